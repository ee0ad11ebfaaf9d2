"""The disk tier: what is read is what was written, whoever is killed, and whatever lies about."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch
from block_files import (
    FIELDS,
    FILE_SIZE,
    bytes_in_use,
    content_of,
    key_of,
    load,
    open_files,
    recorded,
    store,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoserve.extras.kv_offload.disk import BlockFiles, FileMapper
from nanoserve.extras.kv_offload.disk_tier import FileSystemTier, IOThreads, block_buffers
from nanoserve.kv_cache import KVCacheSpec

WAIT = 60.0  # seconds, for what happens at once
ROOT = Path(__file__).parent.parent


def start_python(call: str, root: Path) -> subprocess.Popen[str]:
    """Run a function of block_files.py in a process of its own."""
    code = f"import sys; from pathlib import Path; import block_files; block_files.{call}"
    folders = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    return subprocess.Popen(
        [sys.executable, "-c", code, str(root)],
        env={**os.environ, "PYTHONPATH": folders},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_python(call: str, root: Path) -> tuple[str, str]:
    """What the function prints, and what it logs."""
    with start_python(call, root) as process:
        try:
            output, log = process.communicate(timeout=WAIT)
        finally:
            process.kill()
    assert process.returncode == 0, log
    return output, log


def test_a_block_is_read_as_it_was_written_also_by_another_process(tmp_path: Path) -> None:
    files = open_files(tmp_path)
    assert not files.contains(key_of(1))
    assert load(files, 1) is None
    assert store(files, 1)
    assert store(files, 1)  # once is enough
    assert bytes_in_use(tmp_path) == recorded(tmp_path) == FILE_SIZE
    again = open_files(tmp_path)
    assert again.contains(key_of(1))
    assert load(again, 1) == content_of(1)
    assert load(again, 2) is None
    [config] = tmp_path.glob("org_model_*_r0/config.json")
    assert json.loads(config.read_text()) == FIELDS


@pytest.mark.parametrize("changed", [*FIELDS, "rank"])
def test_engines_that_differ_share_no_file(tmp_path: Path, changed: str) -> None:
    store(open_files(tmp_path), 1)
    if changed == "rank":
        other = open_files(tmp_path, rank=1)
    else:
        other = open_files(tmp_path, fields={**FIELDS, changed: 8})
    assert not other.contains(key_of(1))
    # Nor does a file that somebody copies to the other's name serve.
    [name] = tmp_path.glob("*_r0/*/*.bin")
    other.mapper.get_file_name(key_of(1)).parent.mkdir(parents=True)
    shutil.copy(name, other.mapper.get_file_name(key_of(1)))
    assert other.contains(key_of(1))
    assert load(other, 1) is None


@pytest.fixture(scope="module")
def a_file(tmp_path_factory: pytest.TempPathFactory) -> tuple[BlockFiles, Path, bytes]:
    """One stored block, its file, and the file's content."""
    files = open_files(tmp_path_factory.mktemp("one"))
    store(files, 1)
    name = files.mapper.get_file_name(key_of(1))
    return files, name, name.read_bytes()


@given(st.data())
@settings(max_examples=60)
def test_no_damaged_file_is_served(
    a_file: tuple[BlockFiles, Path, bytes], data: st.DataObject
) -> None:
    """Cut, lengthened, overwritten anywhere: the block is not there, until it is stored again."""
    files, name, good = a_file
    bad = bytearray(good)
    how = data.draw(st.sampled_from(["cut", "lengthen", "overwrite"]))
    if how == "cut":
        del bad[data.draw(st.integers(0, len(good) - 1)) :]
    elif how == "lengthen":
        bad += data.draw(st.binary(min_size=1, max_size=9))
    else:
        start = data.draw(st.integers(0, len(good) - 1))
        for i in range(start, min(len(good), start + data.draw(st.integers(1, 40)))):
            bad[i] ^= data.draw(st.integers(1, 255))
    name.write_bytes(bad)
    assert load(files, 1) is None
    assert not files.contains(key_of(1))
    assert store(files, 1)
    assert load(files, 1) == content_of(1)
    root = files.mapper.root_dir
    assert recorded(root) >= bytes_in_use(
        root
    )  # what was cut off still counts


def test_a_bad_file_is_one_line_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it cannot be deleted."""
    files = open_files(tmp_path)
    store(files, 1)
    name = files.mapper.get_file_name(key_of(1))
    name.write_bytes(name.read_bytes()[:-1] + b"?")

    def refuse(*_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    with monkeypatch.context() as read_only:
        read_only.setattr(os, "open", refuse)
        assert load(files, 1) is None
        assert not files.contains(key_of(1))
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert str(name) in caplog.text
    assert "CRC-32" in caplog.text
    assert store(files, 1)
    assert load(files, 1) == content_of(1)


def test_foreign_files_are_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Neither counted, nor deleted, nor served; a folder with a block's name is no block."""
    room = 2 * FILE_SIZE
    files = open_files(tmp_path, room)
    foreign = [tmp_path / "notes.txt", tmp_path / "other_r0" / "ab" / "big.bin"]
    foreign += [files.mapper.folder / "ab" / "0123.bin.tmp"]
    for name in foreign:
        name.parent.mkdir(parents=True, exist_ok=True)
        name.write_bytes(b"?" * room)
    in_the_way = files.mapper.get_file_name(key_of(1))
    in_the_way.mkdir(parents=True)
    assert not files.contains(key_of(1))
    assert load(files, 1) is None
    assert not store(files, 1)
    assert store(files, 2)
    assert store(files, 3)
    assert store(files, 4)
    assert load(files, 4) == content_of(4)
    assert all(name.read_bytes() == b"?" * room for name in foreign)
    assert in_the_way.is_dir()


def test_what_was_used_last_stays(tmp_path: Path) -> None:
    """A load counts as a use, and blocks of other models and ranks give way as well."""
    room = 8 * FILE_SIZE
    files, other = open_files(tmp_path, room), open_files(tmp_path, room, rank=1)
    for number in range(8):
        assert store(other if number % 2 else files, number)
        os.utime((other if number % 2 else files).mapper.get_file_name(key_of(number)), (1e9, 1e9))
    assert load(files, 0) is not None
    assert load(other, 1) is not None
    for number in range(8, 14):
        assert store(files, number)
        assert bytes_in_use(tmp_path) == recorded(tmp_path) <= room
    there = [n for n in range(14) if files.contains(key_of(n)) or other.contains(key_of(n))]
    assert {0, 1, 8, 9, 10, 11, 12, 13} >= set(there) >= {9, 10, 11, 12, 13}


def test_a_smaller_bound_holds_after_a_restart(tmp_path: Path) -> None:
    for number in range(8):
        store(open_files(tmp_path), number)
    small = 3 * FILE_SIZE
    assert store(open_files(tmp_path, small), 8)
    assert recorded(tmp_path) == bytes_in_use(tmp_path) <= small


def test_bad_options_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="max_bytes is 1075, less than the file of one block"):
        open_files(tmp_path, FILE_SIZE - 1)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"root_dir .*cannot be made.*Give a folder"):
        open_files(tmp_path / "file" / "folder")


def test_a_full_disk_is_one_line_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is stored, nothing is left behind, what is there is served; and when there is room
    again, it is used."""
    files = open_files(tmp_path)
    store(files, 1)
    write = BlockFiles._write

    def fill(self: BlockFiles, file: BinaryIO, key: bytes, buffers: Any) -> None:
        write(self, file, key, buffers[:1])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(BlockFiles, "_write", fill)
        assert not any(store(files, number) for number in range(2, 6))
    assert bytes_in_use(tmp_path) == recorded(tmp_path) == FILE_SIZE
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "No space left on device" in caplog.text
    assert load(files, 1) == content_of(1)
    assert store(files, 2)
    assert load(files, 2) == content_of(2)


@pytest.mark.skipif(sys.platform == "win32", reason="this system has no resource limits")
def test_the_system_itself_refuses_to_write(tmp_path: Path) -> None:
    _, log = run_python("store_under_limit(Path(sys.argv[1]))", tmp_path)
    assert log.count("cannot store blocks") == 1
    assert store(open_files(tmp_path), 1)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_process_may_be_killed_at_any_moment(tmp_path: Path) -> None:
    """kill -9 before each line: what is left is whole or ignored, the bound holds, and the number
    of bytes in use is never too low."""
    output, _ = run_python("be_killed(Path(sys.argv[1]))", tmp_path)
    assert int(output) > 100


def test_processes_share_a_folder_and_its_bound(tmp_path: Path) -> None:
    limit = 25 * FILE_SIZE
    observer = open_files(tmp_path, limit)
    children = [
        start_python(f"share(Path(sys.argv[1]), {start}, {limit})", tmp_path) for start in (0, 1000)
    ]
    try:
        while any(child.poll() is None for child in children):
            with observer._locked():
                assert bytes_in_use(tmp_path) <= limit
    finally:
        for child in children:
            child.kill()
    logs = [child.communicate(timeout=WAIT)[1] for child in children]
    assert [child.returncode for child in children] == [0, 0], logs
    assert bytes_in_use(tmp_path) == recorded(tmp_path) <= limit
    files = open_files(tmp_path)
    there = [n for n in (*range(40), *range(1000, 1040)) if files.contains(key_of(n))]
    assert there
    assert all(load(files, n) == content_of(n) for n in there)


# -- the threads --


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[FileSystemTier]:
    spec = KVCacheSpec(num_kv_heads=2, key_dim=4, value_dim=6)
    caches = [spec.allocate(4, 8, torch.float32, torch.device("cpu")) for _ in range(3)]
    size = 3 * spec.num_bytes(8, torch.float32)
    made = FileSystemTier(BlockFiles(FileMapper(tmp_path, FIELDS), size, 2**30), caches)
    yield made
    made.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn])
def test_the_bytes_of_a_block_are_those_of_its_cpu_blocks(dtype: torch.dtype) -> None:
    """All of them, once each, and of no other block."""
    spec = KVCacheSpec(num_kv_heads=2, key_dim=4, value_dim=6)
    caches = [spec.allocate(3, 8, dtype, torch.device("cpu")) for _ in range(2)]
    buffers = block_buffers(caches, 1)
    assert sum(map(len, buffers)) == 2 * spec.num_bytes(8, dtype)
    for buffer in buffers:
        buffer[:] = b"\x01" * len(buffer)
    for part in (part for layer in caches for part in layer):
        written = part.view(torch.uint8).float().flatten(1).mean(1)
        assert written.tolist() == [0, 1, 0]


def results(tier: FileSystemTier) -> list[tuple[bool, int, bool]]:
    """What has ended: (is it a load, first byte of the key, success)."""
    assert tier.drain_jobs(WAIT)
    return sorted((each.is_load, each.key[0], each.success) for each in tier.get_finished())


def test_blocks_go_to_the_disk_and_come_back_to_other_blocks(tier: FileSystemTier) -> None:
    keys = [bytes([number]) * 32 for number in range(3)]
    for part in (part for layer in tier.caches for part in layer):
        part[:2] = torch.rand_like(part[:2])
    tier.submit_store(keys[0], 0)
    tier.submit_store(keys[1], 1)
    assert results(tier) == [(False, 0, True), (False, 1, True)]
    assert tier.get_finished() == []
    for key, block_id in zip(keys, (3, 2, 1), strict=True):
        tier.submit_load(key, block_id)
    assert results(tier) == [(True, 0, True), (True, 1, True), (True, 2, False)]
    for part in (part for layer in tier.caches for part in layer):
        assert torch.equal(part[0], part[3])
        assert torch.equal(part[1], part[2])
    lookups = [tier.submit_lookup(some) for some in (keys, keys[1:], keys[2:], [])]
    assert tier.drain_jobs(WAIT)
    assert [each.num_found for each in lookups] == [2, 1, 0, 0]


def test_nobody_waits_for_a_disk_that_hangs(tier: FileSystemTier) -> None:
    """Stores that hang hold up no load, and neither holds up the caller."""
    hang, key = threading.Event(), bytes(32)
    tier.submit_store(key, 0)
    assert results(tier) == [(False, 0, True)]

    def never(*_: Any) -> bool:
        return hang.wait(WAIT)

    tier.files.store = never  # type: ignore[assignment]
    for number in range(1, 9):
        tier.submit_store(bytes([number]) * 32, 0)
    tier.submit_load(key, 1)
    assert tier._readers.wait_idle(WAIT)
    [loaded] = tier.get_finished()
    assert (loaded.is_load, loaded.success) == (True, True)
    assert loaded.num_bytes == tier.files.block_bytes
    assert not tier.drain_jobs(0.01)
    hang.set()
    assert len(results(tier)) == 8


def test_the_threads_end_with_their_tier(tmp_path: Path) -> None:
    """Closed or forgotten; also after a task that failed, which the log tells."""

    def make() -> FileSystemTier:
        return FileSystemTier(open_files(tmp_path), [])

    def threads_of(tier: FileSystemTier) -> list[threading.Thread]:
        return [*tier._readers._threads, *tier._writers._threads]

    tier, forgotten = make(), make()
    tier.submit_load(key_of(1), 0)  # no buffers: fails as a file that is too long would
    assert tier.drain_jobs(WAIT)
    threads = threads_of(tier) + threads_of(forgotten)
    tier.close()
    del forgotten
    for thread in threads:
        thread.join(WAIT)
        assert not thread.is_alive()


def test_a_thread_survives_its_tasks(caplog: pytest.LogCaptureFixture) -> None:
    threads, done = IOThreads(1, "test"), []

    def fail() -> None:
        raise RuntimeError("a mistake")

    tasks: list[Callable[[], object]] = [fail, lambda: done.append(1)]
    for task in tasks:
        threads.submit(task)
    assert threads.wait_idle(WAIT)
    threads.close()
    assert done == [1]
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    assert "a mistake" in caplog.text
