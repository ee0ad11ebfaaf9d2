"""How does a prefix outlive the process that computed it?

As a file for each block, under the digest of the block's content (digests.py). So the name says
what is in the file, and nobody keeps a list: the folder is the list, also after a restart, and for
several processes at once.

    root_dir/nanoserve-kv.lock                         held for moments; has the bytes in use
    root_dir/Qwen3-0.6B_5f0c2a9be1d7/config.json       what the 12 digits stand for
    root_dir/Qwen3-0.6B_5f0c2a9be1d7/9e/9e41...c7.bin  one block: keys and values of all layers

    a file     magic 8 | fingerprint 32 | digest 32 | CRC-32 4 | the block's bytes ...

The *fingerprint* is SHA-256 of all that decides what the bytes mean: model, weights, dtype, block
size, layers, number of ranks. Engines that differ in one of them may share a root_dir, and never
share a file. Its first 12 digits are in the folder's name.

*Killed at any moment.* A block is written to a temporary name and renamed when it is whole, so a
name without .tmp is a whole file. The writer holds a lock on the temporary file, which the system
drops with the process: a .tmp without a lock is nobody's, and is deleted. After a loss of power a
renamed file may lack its data; then its CRC-32 does not fit, and it is not served.

*Bounded.* The files of all models and processes, with those that are being written, take at most
max_bytes. Room is taken under the lock before a byte is written: the number in the lock file goes
up before a file appears, and down after one is gone. So it is never too low, whoever is killed; and
when it says that there is no room, the files are counted. Then those that were used least recently
(their time of modification: a load sets it) are deleted, until an eighth of max_bytes is free.

*Skipped.* A file of the wrong size, or with a wrong byte, is a block that is not there. A full or
read-only disk is one line in the log: nothing is stored, and the engine goes on. So are files that
cannot be opened now (too many are open, another user's): they are computed, and left alone.

*Private.* The bytes of a block tell much about its tokens, and whoever can write files decides what
the model reads. So a root_dir that is made here is open to its user alone; one that is there, and
where everybody may write, is a line in the log. No link is followed, and no pipe waited for.

Left out: fsync, O_DIRECT; a use of a file's block in a faster tier is no use of the file.

vLLM: vllm/v1/kv_offload/: tiering/fs/io.py, file_mapper.py (V1). There nothing is bounded, and what
is read is not checked.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
import struct
import threading
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO

from nanoserve.interrupts import suppress
from nanoserve.logger import init_logger
from nanoserve.memory import describe_size

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]
    import msvcrt

logger = init_logger(__name__)

HEADER = struct.Struct("<8s32s32sI")
MAGIC = b"nanokv 1"
LOCK_NAME = "nanoserve-kv.lock"
FILE_NAME = re.compile(r"[0-9a-f]{64}\.bin(\.[0-9a-f]{16}\.tmp)?")  # others are left alone
DISK_SHARE = 10
FREE_SHARE = 8  # when there is no room, 1 / FREE_SHARE of it is made
BAD_FILE = (errno.ELOOP, errno.EIO)  # a link, a damaged disk: these do not pass


def open_file(name: str | Path, flags: int) -> int:
    """os.open for a file in a folder where others may write. What they have put there instead (a
    link to a file of ours, a pipe that nobody writes to) is an OSError, and no wait."""
    safe = ("O_BINARY", "O_CLOEXEC", "O_NOFOLLOW", "O_NONBLOCK")
    for each in safe:
        flags |= getattr(os, each, 0)
    return os.open(name, flags, 0o666)


def lock_file(file: BinaryIO, wait: bool = True) -> bool:
    """Lock an open file against all others that open it, until it is closed. False if it is locked
    and this should not wait. (On Windows only the wait is real: there an open file cannot be
    deleted anyway.) Raises OSError on a file system without locks."""
    if fcntl is not None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            return False
        return True
    while wait:
        file.seek(2**30)  # a byte behind all content
        with suppress(OSError):  # after 10 s
            msvcrt.locking(file.fileno(), msvcrt.LK_LOCK, 1)
            break
    return True


def warn_once(last: str, verb: str, error: OSError) -> str:
    """One line in the log for a full disk, not one for each block. Returns the error as text;
    `last`: the last one."""
    text = error.strerror or str(error)
    if text != last:
        logger.warning("the disk tier cannot %s blocks: %s", verb, error)
    return text


class FileMapper:
    """The name of a block's file: where it is, and what must be written in it."""

    def __init__(self, root_dir: str | Path, identity: Mapping[str, Any]) -> None:
        """`identity`: all that decides what the bytes of a block mean, for json; its "model_name"
        begins the folder's name. Two FileMapper of one root_dir share files exactly if their
        identities are equal."""
        self.root_dir, self.identity = Path(root_dir), dict(identity)
        content = json.dumps(self.identity, sort_keys=True)
        self.fingerprint = hashlib.sha256(content.encode()).digest()
        model = re.sub(r"[^\w.-]", "_", str(identity.get("model_name", "model")))[:64]
        self.folder = self.root_dir / f"{model}_{self.fingerprint.hex()[:12]}"

    def get_file_name(self, key: bytes) -> Path:
        """The file of the block with this digest, in one of 256 folders."""
        digits = key.hex()
        return self.folder / digits[:2] / f"{digits}.bin"


class BlockFiles:
    """The files of one engine's blocks. Any thread may call store, load and contains; each may wait
    for the disk, and raises nothing.

    Invariant: where `load` returns True, the bytes are what some process of the same identity gave
    to `store` under the same key.
    """

    def __init__(self, mapper: FileMapper, block_bytes: int, max_bytes: int | None = None) -> None:
        """max_bytes None: 1 / DISK_SHARE of the disk. Raises ValueError if it holds no block, or if
        the folder is neither there nor can be made."""
        self.mapper = mapper
        self.block_bytes, self.file_size = block_bytes, HEADER.size + block_bytes
        self._mutex = threading.Lock()  # the lock of this process, before that of all processes
        self._is_counted = False  # has this process counted the bytes in use?
        self._skipped: set[bytes] = set()  # keys whose file is bad and could not be deleted
        self._load_error = self._store_error = ""  # of the last load or store: the log has it
        try:
            mapper.root_dir.mkdir(0o700, parents=True, exist_ok=True)
            if os.name == "posix" and mapper.root_dir.stat().st_mode & stat.S_IWOTH:
                logger.warning(
                    "Every user may write into %s, and so decide what the model reads. Run chmod "
                    "o-w on it.",
                    mapper.root_dir,
                )
            disk_bytes = shutil.disk_usage(mapper.root_dir).total
        except OSError as error:
            raise ValueError(
                f"root_dir {str(mapper.root_dir)!r} of the disk tier cannot be made ({error}). "
                "Give a folder that exists or can be made."
            ) from error
        self.max_bytes = disk_bytes // DISK_SHARE if max_bytes is None else max_bytes
        if self.max_bytes < self.file_size:
            raise ValueError(
                f"max_bytes is {self.max_bytes}, less than the file of one block, "
                f"{self.file_size} bytes. Raise it, or leave the disk tier out."
            )

    # -- one block --

    def contains(self, key: bytes) -> bool:
        """Is there a file for this block? (Whether it is good, `load` finds out.)"""
        try:
            found = self.mapper.get_file_name(key).stat()
        except OSError:
            return False
        is_whole = stat.S_ISREG(found.st_mode) and found.st_size == self.file_size
        return is_whole and key not in self._skipped

    def load(self, key: bytes, buffer: memoryview) -> bool:
        """Read a block into `buffer`, [block_bytes]. False, with anything in the buffer, if it is
        not there, not good, or cannot be read now. A bad file is deleted."""
        name, why = self.mapper.get_file_name(key), ""
        try:
            with open(name, "rb", buffering=0, opener=open_file) as file:
                why = self._read(file, key, buffer)
            if not why:
                with suppress(OSError):  # a read-only disk
                    os.utime(name)
                self._load_error = ""
                return True
        except FileNotFoundError:
            return False  # deleted since `contains`
        except OSError as error:
            if error.errno not in BAD_FILE:  # too many open files, no permission: it may be good
                self._load_error = warn_once(self._load_error, "load", error)
                return False
            why = str(error)
        logger.warning("%s is no block that can be used (%s): it is computed again.", name, why)
        self._skipped.add(key)
        with suppress(OSError), self._locked() as ledger:
            self._delete(name, ledger)
            self._skipped.discard(key)
        return False

    def _read(self, file: FileIO, key: bytes, buffer: memoryview) -> str:
        """Read all of a file. Returns what is wrong with it; "" if nothing is."""
        header = file.read(HEADER.size)
        if len(header) < HEADER.size:
            return "it has another size"
        *start, crc = HEADER.unpack(header)
        if start != [MAGIC, self.mapper.fingerprint, key]:
            return "it is of another kind, model or content"
        if file.readinto(buffer) < self.block_bytes or file.read(1):
            return "it has another size"
        return "" if crc == zlib.crc32(buffer, zlib.crc32(header[:-4])) else "its CRC-32 is wrong"

    def store(self, key: bytes, buffer: memoryview) -> bool:
        """Write a block, unless there is a file for it. False if it cannot be written."""
        if self.contains(key):
            return True
        try:
            with self._create(key) as file:
                try:
                    self._write(file, key, buffer)
                    if fcntl is None:
                        file.close()  # Windows renames no open file
                    self._commit(Path(file.name), key)
                except BaseException:
                    self._abandon(file)
                    raise
        except OSError as error:
            self._store_error = warn_once(self._store_error, "store", error)
            return False
        self._store_error = ""
        return True

    def _write(self, file: BinaryIO, key: bytes, buffer: memoryview) -> None:
        start = HEADER.pack(MAGIC, self.mapper.fingerprint, key, 0)[:-4]
        file.write(start + struct.pack("<I", zlib.crc32(buffer, zlib.crc32(start))))
        file.write(buffer)
        file.flush()

    # -- the room of all --

    def _create(self, key: bytes) -> BinaryIO:
        """Take room for a block: a temporary file of its full size, locked. Raises OSError."""
        name = self.mapper.get_file_name(key)
        with self._locked() as ledger:
            used = self._read_used(ledger)
            if used + self.file_size > self.max_bytes:
                used = self._evict()
            self._write_used(ledger, used + self.file_size)
            temporary = Path(f"{name}.{secrets.token_hex(8)}.tmp")
            try:
                name.parent.mkdir(parents=True, exist_ok=True)
                self._describe()
                file = open(temporary, "xb")  # noqa: SIM115
                lock_file(file, wait=False)
                file.truncate(self.file_size)
                return file
            except BaseException:
                temporary.unlink(missing_ok=True)
                self._write_used(ledger, used)
                raise

    def _commit(self, temporary: Path, key: bytes) -> None:
        """The file is whole: give it its name. (Another process may have been faster.)"""
        name = self.mapper.get_file_name(key)
        with self._locked() as ledger:
            with suppress(FileNotFoundError):
                self._delete(name, ledger)
            os.replace(temporary, name)
            self._skipped.discard(key)

    def _abandon(self, file: BinaryIO) -> None:
        """Delete a temporary file that will not be whole."""
        with suppress(OSError), self._locked() as ledger:
            with suppress(OSError):
                file.close()  # a full disk: there may be bytes to flush
            self._delete(Path(file.name), ledger)

    def _delete(self, name: Path, ledger: BinaryIO) -> None:
        """Delete a file of this block size; then there is more room, but no more than was taken for
        it. Under the lock. Raises OSError."""
        used, size = self._read_used(ledger), min(name.stat().st_size, self.file_size)
        name.unlink()
        self._write_used(ledger, used - size)

    @contextmanager
    def _locked(self) -> Iterator[BinaryIO]:
        """Hold the lock of root_dir. The open lock file holds the number of bytes in use."""
        name = self.mapper.root_dir / LOCK_NAME
        flags = os.O_RDWR | os.O_CREAT
        with self._mutex, os.fdopen(open_file(name, flags), "r+b", buffering=0) as ledger:
            lock_file(ledger)
            yield ledger

    def _read_used(self, ledger: BinaryIO) -> int:
        """The bytes in use; counted, if this process has not done so or if they cannot be read."""
        ledger.seek(0)
        text = ledger.read(20)
        if not self._is_counted or not re.fullmatch(rb"\d{20}", text):
            self._is_counted = True
            return sum(size for _, size, _ in self._scan())
        return int(text)

    @staticmethod
    def _write_used(ledger: BinaryIO, number: int) -> None:
        ledger.seek(0)
        ledger.write(b"%020d" % max(0, number))

    def _evict(self) -> int:
        """Delete the files that were used least recently, until there is room; return the bytes in
        use. Raises OSError if there is not enough to delete. Under the lock."""
        files = sorted(self._scan())
        used = sum(size for _, size, _ in files)
        most = min(self.max_bytes - self.file_size, self.max_bytes - self.max_bytes // FREE_SHARE)
        for _, size, name in files:
            if used <= most:
                break
            if not name.endswith(".tmp"):  # being written
                with suppress(OSError):  # Windows: being read
                    os.unlink(name)
                    used -= size
        if used + self.file_size > self.max_bytes:
            limit = describe_size(self.max_bytes)
            raise OSError(f"max_bytes ({limit}) is in use by files that cannot be deleted")
        return used

    def _scan(self) -> list[tuple[int, int, str]]:
        """(time of last use in ns, bytes, name) of every file of ours. What a writer that is no
        more has left is deleted. Under the lock."""
        found = []
        for name in self.mapper.root_dir.glob("*/??/*"):
            if not FILE_NAME.fullmatch(name.name):
                continue
            with suppress(OSError):  # deleted meanwhile
                info = name.lstat()
                is_ours = stat.S_ISREG(info.st_mode)
                if is_ours and not (name.suffix == ".tmp" and self._delete_abandoned(name)):
                    found.append((info.st_mtime_ns, info.st_size, str(name)))
        return found

    @staticmethod
    def _delete_abandoned(temporary: Path) -> bool:
        """Delete a temporary file whose writer is no more. False if that is not known."""
        with suppress(OSError):  # Windows: it is open; or too many files are
            with open(temporary, "rb") as file:
                is_abandoned = lock_file(file, wait=False)
            if is_abandoned:
                temporary.unlink()
                return True
        return False

    def _describe(self) -> None:
        """Write config.json, for whoever looks into the folder."""
        name = self.mapper.folder / "config.json"
        if not os.path.lexists(name):
            text = json.dumps(self.mapper.identity, indent=2, sort_keys=True)
            name.write_text(text + "\n", encoding="utf-8")
