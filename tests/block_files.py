"""Blocks to store for the tests of the disk tier, and what other processes do in them.

Imports no torch and starts no thread, so that a test's processes start quickly and may fork.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from nanoserve.extras.kv_offload import files as module
from nanoserve.extras.kv_offload.files import HEADER, LOCK_NAME, BlockFiles, FileMapper

IDENTITY = {"model_name": "org/model", "block_size": 16, "ranks": 2}
SIZE = 1000  # bytes of a block
FILE_SIZE = HEADER.size + SIZE
BAD = b"?" * FILE_SIZE


def key_of(number: int) -> bytes:
    return hashlib.sha256(b"%d" % number).digest()


def content_of(number: int) -> bytes:
    """Bytes that no other number has."""
    return (hashlib.sha512(b"%d" % number).digest() * (SIZE // 64 + 1))[:SIZE]


def open_files(
    root: Path, max_bytes: int = 2**30, identity: Mapping[str, Any] = IDENTITY
) -> BlockFiles:
    return BlockFiles(FileMapper(root, identity), SIZE, max_bytes)


def store(files: BlockFiles, number: int) -> bool:
    return files.store(key_of(number), memoryview(content_of(number)))


def load(files: BlockFiles, number: int) -> bytes | None:
    """What is read for this block; None if nothing is."""
    found = bytearray(SIZE)
    return bytes(found) if files.load(key_of(number), memoryview(found)) else None


def bytes_in_use(root: Path) -> int:
    return sum(name.stat().st_size for name in root.glob("*/*/*"))


def recorded(root: Path) -> int:
    """What the lock file says."""
    return int((root / LOCK_NAME).read_text())


# -- in other processes --


def share(root: Path, start: int, limit: int) -> None:
    """Store and load blocks, some of which others store too, within a bound that all of them
    exceed many times."""
    files = open_files(root, limit)
    for number in range(start, start + 40):
        for each in (number % 30, number):
            assert store(files, each), each
            assert recorded(root) <= limit
            assert load(files, each) in (None, content_of(each)), each


def store_under_limit(root: Path) -> None:
    """Let the system refuse to write as many bytes as a block has."""
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (SIZE, resource.RLIM_INFINITY))
    files = open_files(root)
    assert not any(store(files, number) for number in range(3))
    assert bytes_in_use(root) == recorded(root) == 0


def be_killed(root: Path) -> None:
    """For each change that a store, an eviction and the reading of a bad file make in the folder:
    fork a child that is killed right after it, and look what it has left. Prints the numbers of
    changes."""
    for num_files in (0, 3):  # 3: there is no room for another
        status, moment, limit = -1, 0, 3 * FILE_SIZE
        while status:
            _fill(root, num_files, limit)
            survivor = open_files(root, limit)  # a process that lives on: it does not count again
            assert store(survivor, 0)
            if not (pid := os.fork()):
                _die_at(moment, open_files(root, limit), root)
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            assert status in (0, -signal.SIGKILL), status
            assert bytes_in_use(root) <= recorded(root) <= limit, moment
            names = [name for name in root.glob("*/*/*") if name.suffix != ".tmp"]
            for number in range(5):
                name = survivor.mapper.get_file_name(key_of(number))
                if name in names and name.read_bytes() != BAD:
                    assert load(survivor, number) == content_of(number), (moment, number)
            assert store(survivor, 5), moment  # there is room, or it is made
            starting = open_files(root, limit)
            assert store(starting, 6), moment
            assert load(starting, 6) == content_of(6), moment
            assert not list(root.glob("*/*/*.tmp")), moment  # cleaned up
            assert recorded(root) == bytes_in_use(root), moment
            moment += 1
        print(moment)


def _fill(root: Path, num_files: int, limit: int) -> None:
    """Begin with so many blocks, and the right number of bytes in the lock file."""
    shutil.rmtree(root)
    root.mkdir()
    files = open_files(root, limit)
    for number in range(num_files):
        store(files, number)


def _die_at(moment: int, files: BlockFiles, root: Path) -> None:
    """The child is killed before the line that follows the change number `moment`. It ends with
    status 0 if there are not so many."""
    last, num_left = _state(root), moment

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal last, num_left
        if frame.f_code.co_filename != module.__file__:
            return None
        if event == "line" and (state := _state(root)) != last:
            last, num_left = state, num_left - 1
        if num_left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return trace

    sys.settrace(trace)
    store(files, 4)
    files.contains = lambda key: False  # type: ignore[method-assign]
    store(files, 4)  # as if another process had stored it meanwhile
    files.mapper.get_file_name(key_of(4)).write_bytes(BAD)
    load(files, 4)
    os._exit(0)


def _state(root: Path) -> list[object]:
    """All that a killed process leaves."""
    stats = [(name, name.stat()) for name in root.glob("*/*/*")]
    found = [(str(name), info.st_size, info.st_mtime_ns) for name, info in stats]
    return [sorted(found), (root / LOCK_NAME).read_text()]
