"""How do keys and values outlive the process that computed them, and how does another one get them?

As a file for each block and rank, named by what the block holds. So nobody keeps a list: the folder
is the list, also after a restart, and for several engines at once.

    root_dir/nanoserve-kv.lock                      held while files are written; bytes in use
    root_dir/5f0c2a9be1d7a3e4/9e/9e41...c7.0.bin    one block of rank 0: keys and values, all layers

    a file     magic 8 | fingerprint 32 | digest 32 | CRC-32 4 | the block's bytes ...

*Digest.* In the engine a BlockHash, an object, stands for a prefix. Outside of the process its
SHA-256 does, of the parent's digest and the block's tokens, as in vLLM:

    root       sha256("('a salt', 'an adapter')")      Sequence.extra_keys
    block 0    sha256(root's digest + "5 6 7 8")
    block 1    sha256(block 0's digest + "9 10 11 12")

*Fingerprint.* SHA-256 of all that decides what the bytes mean: the checkpoint, dtypes, block size,
ranks. Engines that differ in one of them may share a root_dir, and never share a file. (The weights
are known by names, sizes, times of change, and samples: to read all of them takes too long.)

*Killed at any moment.* A file is written under a temporary name and renamed when it is whole. There
is no fsync: after a loss of power a renamed file may lack its data. Then its CRC-32 is wrong. A
file that is damaged, or is not what its name says, is a line in the log and deleted; its block is
computed.

*Bounded.* One process at a time writes, under the lock. The lock file holds the bytes that all
files take: it is written before a file is, so that it is never too low, whoever is killed. When
there is no room, the files are counted, and those that were not used for the longest time are
deleted (a file's time of change: reading sets it) until an eighth of max_bytes is free.

Whoever can write into the folder decides what the model reads: one that is made here is its user's
alone. Left out: Windows (which has no flock), O_DIRECT, a disk that hangs.

vLLM: vllm/v1/kv_offload/tiering/fs/, file_mapper.py, vllm/v1/core/kv_cache_utils.py (0.32). There,
nothing is bounded, and what is read is not checked.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import shutil
import struct
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO
from weakref import WeakKeyDictionary

import numpy as np
import torch

from nanoserve.block_manager import BlockHash
from nanoserve.config import EngineConfig
from nanoserve.kernels.selector import choose_dtype
from nanoserve.models.config import ModelConfig
from nanoserve.models.registry import ModelRegistry

logger = logging.getLogger("nanoserve")

HEADER = struct.Struct("<8s32s32sI")
MAGIC = b"nanokv 1"
NUM_SAMPLES, SAMPLE = 256, 4096  # of a checkpoint's file: so many pieces, of so many bytes
# Options that decide what the bytes of a block mean.
IDENTITY = (
    *("block_size", "kv_cache_dtype", "quantization", "max_model_len", "load_format", "seed"),
    *("tensor_parallel_size", "pipeline_parallel_size", "speculative_config", "model_impl"),
)


def fingerprint(config: EngineConfig, model_config: ModelConfig) -> bytes:
    """32 bytes: equal in two engines exactly if they may share files. `config` must be resolved."""
    dtype = choose_dtype(config.dtype, model_config, torch.device(config.device))
    values = {name: getattr(config, name, None) for name in IDENTITY}
    model_cls = ModelRegistry.get(model_config.architecture)
    digest = hashlib.sha256(repr((MAGIC, dtype, model_cls, values)).encode())
    for file in sorted(model_config.path.iterdir()):
        if file.suffix in (".json", ".safetensors"):
            digest.update(describe(file))
    return digest.digest()


def describe(file: Path) -> bytes:
    """Name, size, time of change, and pieces of the content, from the first bytes to the last."""
    digest, found = hashlib.sha256(), file.stat()
    digest.update(repr((file.name, found.st_size, found.st_mtime_ns)).encode())
    with open(file, "rb", buffering=0) as opened:
        for start in range(0, found.st_size, max(SAMPLE, found.st_size // NUM_SAMPLES)):
            opened.seek(start)
            digest.update(opened.read(SAMPLE))
    return digest.digest()


class BlockFiles:
    """The files of one engine. Its scheduler reads, each rank writes. No method raises: what the
    disk refuses is a line in the log.

    Invariant: what `read` returns is what some engine with this fingerprint gave to `write` for
    this content.
    """

    def __init__(
        self, root_dir: str | Path, max_bytes: int | None, fingerprint: bytes, num_ranks: int = 1
    ) -> None:
        """Raises ValueError if the folder is neither there nor can be made."""
        self.root_dir = Path(root_dir).expanduser()
        self.fingerprint, self.num_ranks = fingerprint, num_ranks
        self.digests: WeakKeyDictionary[BlockHash, bytes] = WeakKeyDictionary()
        try:
            self.root_dir.mkdir(0o700, parents=True, exist_ok=True)
            self.max_bytes = max_bytes or shutil.disk_usage(self.root_dir).total // 10
        except OSError as error:
            raise ValueError(f"the folder {root_dir} for KV blocks: {error}.") from error

    def get_digest(self, block_hash: BlockHash) -> bytes:
        """32 bytes, the same in every process. Computed once for each BlockHash."""
        chain: list[BlockHash] = []  # from this block back to one that is known
        node: BlockHash | None = block_hash
        while node is not None and node not in self.digests:
            chain.append(node)
            node = node.parent
        digest = b"" if node is None else self.digests[node]
        for node in reversed(chain):
            tokens = node.token_ids
            text = repr(tokens) if node.parent is None else " ".join(map(str, tokens))
            digest = self.digests[node] = hashlib.sha256(digest + text.encode()).digest()
        return digest

    def get_path(self, digest: bytes, rank: int) -> Path:
        folder = self.root_dir / self.fingerprint.hex()[:16]
        return folder / digest.hex()[:2] / f"{digest.hex()}.{rank}.bin"

    def make_header(self, digest: bytes, data: np.ndarray) -> bytes:
        return HEADER.pack(MAGIC, self.fingerprint, digest, zlib.crc32(data))

    def contains(self, block_hash: BlockHash) -> bool:
        """Are there files of all ranks? (Whether they are good, `read` finds out.)"""
        digest = self.get_digest(block_hash)
        return all(os.path.exists(self.get_path(digest, rank)) for rank in range(self.num_ranks))

    # -- one file --

    def read(self, block_hash: BlockHash) -> list[np.ndarray] | None:
        """The bytes of each rank's block, uint8 [num_bytes]; None if one is not there, or bad."""
        digest, found = self.get_digest(block_hash), []
        for rank in range(self.num_ranks):
            path = self.get_path(digest, rank)
            try:
                content = np.fromfile(path, np.uint8)
                header, data = content[: HEADER.size].tobytes(), content[HEADER.size :]
                if header != self.make_header(digest, data):
                    logger.warning("%s is damaged, or no KV block: it is deleted.", path)
                    path.unlink(missing_ok=True)
                    return None
                os.utime(path)
                found.append(data)
            except FileNotFoundError:  # deleted since `contains`
                return None
            except OSError as error:
                logger.warning("a KV block cannot be read: %s", error)
                return None
        return found

    def write(self, rank: int, blocks: Mapping[bytes, np.ndarray]) -> None:
        """Write one rank's bytes of each block, uint8 [num_bytes], under its digest."""
        try:
            with self.locked() as ledger:
                for digest, data in blocks.items():
                    path = self.get_path(digest, rank)
                    if not path.exists():
                        self.take_room(ledger, HEADER.size + data.nbytes)
                        path.parent.mkdir(parents=True, exist_ok=True)
                        temporary = path.with_suffix(".tmp")  # nobody else writes now
                        with open(temporary, "wb") as file:
                            file.write(self.make_header(digest, data))
                            file.write(data)
                        temporary.replace(path)
        except OSError as error:  # a full or read-only disk: they are computed again
            logger.warning("KV blocks cannot be written: %s", error)

    # -- the room of all --

    @contextmanager
    def locked(self) -> Iterator[BinaryIO]:
        """Hold the lock of root_dir; the system drops it with the process. Yields the lock file,
        which holds the number of bytes in use."""
        self.root_dir.mkdir(0o700, parents=True, exist_ok=True)
        descriptor = os.open(self.root_dir / "nanoserve-kv.lock", os.O_RDWR | os.O_CREAT, 0o600)
        with os.fdopen(descriptor, "r+b", buffering=0) as ledger:
            fcntl.flock(ledger, fcntl.LOCK_EX)
            yield ledger

    def take_room(self, ledger: BinaryIO, num_bytes: int) -> None:
        """Count `num_bytes` more as in use; make room for them first. Raises OSError if there is
        none."""
        ledger.seek(0)
        text = ledger.read()
        used = int(text) if text.isdigit() else self.max_bytes  # unknown: count
        if used + num_bytes > self.max_bytes:
            used = self.evict(num_bytes)
        ledger.seek(0)
        ledger.write(b"%020d" % (used + num_bytes))

    def evict(self, num_bytes: int) -> int:
        """Delete what was not used for the longest time; return the bytes that are left in use."""
        if num_bytes > self.max_bytes:
            raise OSError(f"max_bytes is {self.max_bytes}, and one block takes {num_bytes}")
        for temporary in self.root_dir.glob("*/??/*.tmp"):  # of a process that is no more
            temporary.unlink()
        found = []
        for path in self.root_dir.glob("*/??/*.bin"):
            with suppress(FileNotFoundError):  # another engine has found it damaged
                info = path.stat()
                found.append((info.st_mtime_ns, info.st_size, path))
        used = sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if used <= self.max_bytes - max(num_bytes, self.max_bytes // 8):
                break
            path.unlink(missing_ok=True)
            used -= size
        return used
