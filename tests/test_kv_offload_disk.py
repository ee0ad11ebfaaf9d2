"""The disk tier: what is read is what was written, whoever is killed, and whatever lies about."""

from __future__ import annotations

import builtins
import errno
import json
import logging
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest

pytest.importorskip("nanoserve.extras.kv_offload")

from block_files import (
    FILE_SIZE,
    IDENTITY,
    SIZE,
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

from nanoserve.extras.kv_offload.base import LookupResult, PrimaryTier, TransferJob
from nanoserve.extras.kv_offload.disk import BELIEVED, FileSystemTierManager
from nanoserve.extras.kv_offload.files import BlockFiles

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
    [config] = tmp_path.glob("org_model_*/config.json")
    assert json.loads(config.read_text()) == IDENTITY


@pytest.mark.parametrize("changed", IDENTITY)
def test_engines_that_differ_share_no_file(tmp_path: Path, changed: str) -> None:
    files, other = open_files(tmp_path), open_files(tmp_path, identity={**IDENTITY, changed: 8})
    store(files, 1)
    assert not other.contains(key_of(1))
    # Nor does a file that somebody copies to the other's name serve.
    name = other.mapper.get_file_name(key_of(1))
    name.parent.mkdir(parents=True)
    shutil.copy(files.mapper.get_file_name(key_of(1)), name)
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
    assert recorded(root) >= bytes_in_use(root)  # what was cut off still counts


def refuse_to_create(name: str, flags: int, *mode: int, _open: Any = os.open) -> Any:
    """os.open on a read-only disk."""
    if flags & os.O_CREAT:
        raise OSError(errno.EROFS, "Read-only file system")
    return _open(name, flags, *mode)


def test_a_bad_file_is_one_line_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it cannot be deleted."""
    files = open_files(tmp_path)
    store(files, 1)
    name = files.mapper.get_file_name(key_of(1))
    name.write_bytes(name.read_bytes()[:-1] + b"?")

    with monkeypatch.context() as read_only:
        read_only.setattr(os, "open", refuse_to_create)
        assert load(files, 1) is None
        assert not files.contains(key_of(1))
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert str(name) in caplog.text
    assert "CRC-32" in caplog.text
    assert store(files, 1)
    assert load(files, 1) == content_of(1)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EACCES, errno.ESTALE])
def test_a_good_file_that_cannot_be_opened_now_is_left_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    files = open_files(tmp_path)
    store(files, 1)

    def refuse(name: Any, flags: int, *mode: int, _open: Any = os.open) -> Any:
        if str(name).endswith(".bin"):
            raise OSError(number, os.strerror(number))
        return _open(name, flags, *mode)

    with monkeypatch.context() as refusing:
        refusing.setattr(os, "open", refuse)
        assert load(files, 1) is None
        assert load(files, 1) is None
    assert os.strerror(number) in caplog.text
    assert len(caplog.records) == 1
    assert files.contains(key_of(1))
    assert load(files, 1) == content_of(1)


def test_foreign_files_are_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Neither counted, nor deleted, nor served; a folder with a block's name is no block."""
    room = 2 * FILE_SIZE
    files = open_files(tmp_path, room)
    foreign = [tmp_path / "lock", tmp_path / "other" / "ab" / "big.bin"]
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


def test_a_file_under_another_name_is_not_served(tmp_path: Path) -> None:
    files = open_files(tmp_path)
    store(files, 1)
    store(files, 2)
    shutil.copy(*(files.mapper.get_file_name(key_of(number)) for number in (1, 2)))
    assert load(files, 2) is None
    assert load(files, 1) == content_of(1)


def test_a_block_that_two_store_at_once_is_counted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = open_files(tmp_path)
    monkeypatch.setattr(BlockFiles, "contains", lambda *_: False)  # neither sees the other's
    assert store(files, 1)
    assert store(open_files(tmp_path), 1)
    assert load(files, 1) == content_of(1)
    assert recorded(tmp_path) == bytes_in_use(tmp_path) == FILE_SIZE


def test_a_temporary_file_that_cannot_be_opened_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its writer may be at work: the bytes in use are never more than those that are recorded."""
    store(open_files(tmp_path), 1)
    [name] = tmp_path.glob("*/??/*.bin")
    temporary = Path(f"{name}.{'0' * 16}.tmp")
    temporary.write_bytes(bytes(FILE_SIZE))

    def refuse(name: Any, *rest: Any, _open: Any = open, **options: Any) -> Any:
        if name == temporary:
            raise OSError(errno.EMFILE, "Too many open files")
        return _open(name, *rest, **options)

    monkeypatch.setattr(builtins, "open", refuse)
    assert store(open_files(tmp_path), 2)
    assert recorded(tmp_path) == bytes_in_use(tmp_path) == 3 * FILE_SIZE
    monkeypatch.undo()
    assert store(open_files(tmp_path), 3)
    assert not temporary.exists()


def test_what_was_used_last_stays(tmp_path: Path) -> None:
    """A load counts as a use, and blocks of other models give way as well."""
    room = 8 * FILE_SIZE
    files, other = open_files(tmp_path, room), open_files(tmp_path, room, {"model_name": "other"})
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


@pytest.mark.skipif(sys.platform == "win32", reason="this system has no such permissions")
def test_a_new_folder_is_private(tmp_path: Path) -> None:
    """One that is there stays as it is."""
    for name, mode in (("new", 0o700), ("old", 0o755)):
        if name == "old":
            (tmp_path / name).mkdir(mode)
        open_files(tmp_path / name)
        assert (tmp_path / name).stat().st_mode & 0o777 == mode


@pytest.mark.skipif(sys.platform == "win32", reason="this system has no such permissions")
def test_a_folder_for_everybody_is_one_line_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "public").mkdir()
    (tmp_path / "public").chmod(0o1777)
    for name in ("public", "new"):
        open_files(tmp_path / name)
    [record] = caplog.records
    assert "Every user may write into" in record.message and "public" in record.message


@pytest.mark.skipif(sys.platform == "win32", reason="this system has no such links and pipes")
def test_no_link_is_followed_and_no_pipe_waited_for(tmp_path: Path) -> None:
    """Where others may write: a link leads to a file of this user, which would be changed."""
    victim, root = tmp_path / "victim", tmp_path / "root"
    victim.write_bytes(b"precious" * 10)
    root.mkdir()
    (root / "nanoserve-kv.lock").symlink_to(victim)
    assert not store(open_files(root), 1)
    assert victim.read_bytes() == b"precious" * 10
    (root / "nanoserve-kv.lock").unlink()
    files = open_files(root)
    (root / files.mapper.folder / "config.json").parent.mkdir(parents=True)
    (root / files.mapper.folder / "config.json").symlink_to(tmp_path / "made")
    assert store(files, 1)
    assert not (tmp_path / "made").exists()
    name = files.mapper.get_file_name(key_of(1))
    name.rename(tmp_path / "block")
    name.symlink_to(tmp_path / "block")
    assert load(files, 1) is None
    name.unlink(missing_ok=True)
    os.mkfifo(name)
    assert load(files, 1) is None


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
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

    def fill(self: BlockFiles, file: BinaryIO, key: bytes, buffer: memoryview) -> None:
        file.write(buffer[:99])
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


def test_a_read_only_folder_is_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    store(open_files(tmp_path), 1)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "open", refuse_to_create)  # the lock, and what is new
    monkeypatch.setattr(os, "utime", refuse)
    files = open_files(tmp_path)
    assert load(files, 1) == content_of(1)
    assert not any(store(files, number) for number in range(2, 6))
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "Read-only file system" in caplog.text


@pytest.mark.skipif(sys.platform == "win32", reason="this system has no resource limits")
def test_the_system_itself_refuses_to_write(tmp_path: Path) -> None:
    _, log = run_python("store_under_limit(Path(sys.argv[1]))", tmp_path)
    assert log.count("cannot store blocks") == 1
    assert store(open_files(tmp_path), 1)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_process_may_be_killed_at_any_moment(tmp_path: Path) -> None:
    """kill -9 after each change on the disk: what is left is whole or ignored, the bound holds, and
    the number of bytes in use is never too low."""
    output, _ = run_python("be_killed(Path(sys.argv[1]))", tmp_path)
    assert all(int(number) > 12 for number in output.split())


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
    assert logs == ["", ""]  # nobody sees a file that is not whole
    assert bytes_in_use(tmp_path) == recorded(tmp_path) <= limit
    files = open_files(tmp_path)
    there = [n for n in (*range(40), *range(1000, 1040)) if files.contains(key_of(n))]
    assert there
    assert all(load(files, n) == content_of(n) for n in there)


# -- the threads --


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[FileSystemTierManager]:
    """A tier below 4 rows, of which the first two hold something."""
    rows = np.zeros((4, SIZE), np.uint8)
    for number in range(2):
        rows[number] = np.frombuffer(content_of(number), np.uint8)
    made = FileSystemTierManager(PrimaryTier(rows, IDENTITY), root_dir=tmp_path, n_read_threads=2)
    yield made
    made.shutdown()


def finished(tier: FileSystemTierManager) -> dict[int, set[bytes]]:
    """job_id -> what was moved, of the jobs that have ended."""
    tier.drain_jobs(WAIT)
    results = list(tier.get_finished_jobs())
    assert len({each.job_id for each in results}) == len(results)
    assert all(each.transfer_bytes == SIZE * len(each.successful_keys) for each in results)
    return {each.job_id: set(each.successful_keys) for each in results}


def look_up(tier: FileSystemTierManager, keys: list[bytes]) -> list[LookupResult]:
    """What the tier knows when its threads have looked."""
    for key in keys:
        tier.lookup(key)
    assert tier._readers.wait_idle(WAIT)
    return [tier.lookup(key) for key in keys]


def test_blocks_go_to_the_disk_and_come_back_to_other_rows(tier: FileSystemTierManager) -> None:
    """A job tells which of its blocks were moved: a load is good as far as it goes."""
    keys = [key_of(number) for number in range(3)]
    hit, miss = LookupResult.HIT, LookupResult.MISS
    assert tier.lookup(keys[0]) is LookupResult.RETRY
    assert look_up(tier, keys) == [miss, miss, miss]
    tier.submit_store(TransferJob(1, (keys[0], keys[1]), (0, 1)))
    assert finished(tier) == {1: {keys[0], keys[1]}}
    assert finished(tier) == {}
    assert look_up(tier, keys) == [hit, hit, miss]
    tier.submit_load(TransferJob(2, (keys[1], keys[2]), (2, 0)))
    tier.submit_load(TransferJob(3, (keys[0],), (3,)))
    tier.submit_load(TransferJob(4, (), ()))
    assert finished(tier) == {2: {keys[1]}, 3: {keys[0]}, 4: set()}
    assert bytes(tier.rows[2]) == content_of(1)
    assert bytes(tier.rows[3]) == content_of(0)
    tier.files.mapper.get_file_name(keys[0]).unlink()  # another process has evicted it
    tier.submit_load(TransferJob(5, (keys[0],), (3,)))
    assert finished(tier) == {5: set()}
    assert look_up(tier, keys) == [miss, hit, miss]


def test_old_answers_are_asked_again(
    tier: FileSystemTierManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process may have stored the block meanwhile. Who keeps asking gets the same answer:
    of many questions, the first must not be forgotten before the last is answered."""
    now, key = 100.0, key_of(5)
    monkeypatch.setattr("nanoserve.extras.kv_offload.disk.time.monotonic", lambda: now)
    assert look_up(tier, [key]) == [LookupResult.MISS]
    assert store(open_files(tier.files.mapper.root_dir), 5)
    for _ in range(5):
        now += BELIEVED * 0.9
        assert tier.lookup(key) is LookupResult.MISS
    now += BELIEVED * 1.1
    assert tier.lookup(key) is LookupResult.RETRY
    assert look_up(tier, [key]) == [LookupResult.HIT]


def test_many_new_answers_are_not_sorted_out_one_by_one(
    tier: FileSystemTierManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long prompts have more blocks than there are old answers to forget."""
    asked = []

    def is_believed(answer: Any, now: float) -> bool:
        asked.append(answer)
        return now - answer.asked_at < BELIEVED

    now = 100.0
    monkeypatch.setattr("nanoserve.extras.kv_offload.disk.time.monotonic", lambda: now)
    monkeypatch.setattr("nanoserve.extras.kv_offload.disk.MOST_ANSWERS", 10)
    monkeypatch.setattr("nanoserve.extras.kv_offload.disk._Answer.is_believed", is_believed)
    tier._most_answers = 10
    for number in range(1000):
        tier.lookup(key_of(number))
    assert len(asked) < 3000
    now += BELIEVED * 2
    for number in range(1000, 3000):
        tier.lookup(key_of(number))
    assert len(tier._answers) <= 2000


def test_nobody_waits_for_a_disk_that_hangs(tier: FileSystemTierManager) -> None:
    """Stores that hang hold up no load, and neither holds up the caller."""
    hang, key = threading.Event(), key_of(0)
    tier.submit_store(TransferJob(1, (key,), (0,)))
    assert finished(tier) == {1: {key}}

    def never(*_: object) -> bool:
        return hang.wait(WAIT)

    tier.files.store = never  # type: ignore[assignment]
    for number in range(2, 9):
        tier.submit_store(TransferJob(number, (key_of(number),), (0,)))
    tier.submit_load(TransferJob(9, (key,), (1,)))
    assert tier._readers.wait_idle(WAIT)
    [loaded] = tier.get_finished_jobs()
    assert (loaded.job_id, set(loaded.successful_keys)) == (9, {key})
    tier.drain_jobs(0.01)
    assert tier.get_finished_jobs() == []
    hang.set()
    assert len(finished(tier)) == 7


def test_a_disk_that_hangs_is_empty_until_it_answers(
    tier: FileSystemTierManager, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise every request would wait for it, one after the other."""
    monkeypatch.setattr("nanoserve.extras.kv_offload.disk.HANGS_AFTER", -1.0)
    hang, key = threading.Event(), key_of(0)
    tier.submit_store(TransferJob(1, (key,), (0,)))
    assert finished(tier) == {1: {key}}
    contains = tier.files.contains
    tier.files.contains = lambda key: hang.wait(WAIT) and contains(key)  # type: ignore[assignment]
    assert tier.lookup(key) is LookupResult.RETRY
    assert [tier.lookup(key_of(number)) for number in range(9)] == [LookupResult.MISS] * 9
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    hang.set()
    assert look_up(tier, [key]) == [LookupResult.HIT]


def test_the_threads_end_with_their_tier(tmp_path: Path) -> None:
    """Those of a tier that is forgotten, too."""

    def make(name: str) -> FileSystemTierManager:
        primary = PrimaryTier(np.ones((4, SIZE), np.uint8), IDENTITY)
        return FileSystemTierManager(primary, root_dir=str(tmp_path / name))

    tier, forgotten = make("a"), make("b")
    keys = tuple(key_of(number) for number in range(4))
    tier.submit_store(TransferJob(1, keys, (0, 1, 2, 3)))
    tier.drain_jobs(WAIT)
    pools = [tier._readers, tier._writers, forgotten._readers, forgotten._writers]
    tier.shutdown()
    del forgotten
    for thread in (thread for threads in pools for thread in threads.threads):
        thread.join(WAIT)
        assert not thread.is_alive()
    assert all(tier.files.contains(key) for key in keys)


def test_a_task_that_fails_is_reported(
    tier: FileSystemTierManager, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> bool:
        raise RuntimeError("a mistake")

    tier.files.load = fail  # type: ignore[assignment]
    for number in range(1, 9):  # more than threads
        tier.submit_load(TransferJob(number, (key_of(1),), (0,)))
    assert finished(tier) == {number: set() for number in range(1, 9)}
    assert {record.levelno for record in caplog.records} == {logging.ERROR}
    assert "a mistake" in caplog.text


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({}, TypeError, "root_dir of a tier of type 'fs' must be a folder"),
        ({"root_dir": 3}, TypeError, "root_dir of a tier of type 'fs' must be a folder"),
        ({"root_dir": "x", "max_bytes": 0}, ValueError, "max_bytes is 0; allowed"),
        ({"root_dir": "x", "max_bytes": 100}, ValueError, "less than the file of one block"),
        ({"root_dir": "x", "n_read_threads": 0}, ValueError, "n_read_threads is 0; allowed"),
        ({"root_dir": "x", "n_write_threads": "2"}, TypeError, "n_write_threads must be an int"),
        ({"root_dir": "x", "root": "y"}, TypeError, "unknown key 'root'. Did you mean 'root_dir'"),
        ({"root_dir": "x", "zone": 1}, TypeError, "unknown key 'zone'. Allowed: root_dir, "),
        ({"root_dir": "x", "locality": "REMOTE"}, ValueError, "locality .* is 'REMOTE'"),
    ],
)
def test_bad_options_are_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    error: type[Exception],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    num_threads = threading.active_count()
    with pytest.raises(error, match=message):
        FileSystemTierManager(PrimaryTier(np.zeros((1, SIZE), np.uint8), IDENTITY), **options)
    assert threading.active_count() == num_threads


def test_vllms_other_options_are_accepted_where_they_change_nothing(tmp_path: Path) -> None:
    primary = PrimaryTier(np.zeros((1, SIZE), np.uint8), IDENTITY)
    options = {"root_dir": tmp_path, "enable_kv_events": False, "locality": "LOCAL"}
    tier = FileSystemTierManager(primary, **options)
    tier.shutdown()
    assert tier.files.max_bytes == shutil.disk_usage(tmp_path).total // 10
