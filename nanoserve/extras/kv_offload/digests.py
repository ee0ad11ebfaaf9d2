"""What is a block called outside of this process?

In the engine a block's content has an interned object for a name (BlockHash), which is worth
nothing in another process. A *digest* is worth something there: SHA-256 of the parent's digest and
the block's own tokens. So one digest stands for the whole prefix, as vLLM's block hashes do.

    root       sha256(extra keys)                       the salt, and the adapter
    block 0    sha256(root's digest, "5 6 7 8")
    block 1    sha256(block 0's digest, "9 10 11 12")

The model is not in it: a tier puts that beside it (PrimaryTier.identity).

An adapter's number means nothing in another process either. In its place stands what its file is.

*What a file is*: its size, its time of change, and pieces of its content. The time alone does not
tell two files apart: in the layers of an image, or after `rsync -a`, all of them may have the same.
All content would take longer to read than the weights take to load, and weights that are trained
differ everywhere.

vLLM: vllm/v1/core/kv_cache_utils.py hash_block_tokens, vllm/v1/kv_offload/file_mapper.py (V1).
"""

from __future__ import annotations

import hashlib
import os
import secrets
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from nanoserve.block_manager import BlockHash
from nanoserve.sequence import Sequence

NUM_PIECES, PIECE = 256, 4096  # of a file: as many pieces, of as many bytes


class BlockDigests:
    """BlockHash -> digest, computed once for each, and dropped with it."""

    def __init__(self) -> None:
        self._digests: WeakKeyDictionary[BlockHash, bytes] = WeakKeyDictionary()
        self._adapters: dict[int, str] = {}  # Adapter.key -> what it is

    def note_adapter(self, seq: Sequence) -> None:
        """Before the first block of `seq`: know its adapter. Any thread may call this, and may wait
        for a disk."""
        if seq.lora is None or seq.lora.key in self._adapters:
            return
        files = seq.lora.files  # as they were checked: later ones are refused when they are loaded
        try:
            name = repr((sorted(files.scalings.items()), describe_file(files.file)))
        except OSError:  # deleted since it was checked
            name = secrets.token_hex()  # what it computes, if anything, is for nobody else
        self._adapters[seq.lora.key] = name

    def get(self, block_hash: BlockHash) -> bytes:
        """The digest, 32 bytes."""
        chain = []  # from this block back to one that is known
        node: BlockHash | None = block_hash
        while node is not None and node not in self._digests:
            chain.append(node)
            node = node.parent
        digest = b"" if node is None else self._digests[node]
        for node in reversed(chain):
            data = node.token_ids if node.parent is not None else self._name_root(node.token_ids)
            digest = self._digests[node] = hashlib.sha256(digest + repr(data).encode()).digest()
        return digest

    def _name_root(self, extra_keys: Any) -> Any:
        """The extra keys (Sequence.extra_keys), with an adapter's files in place of its number."""
        if not isinstance(extra_keys, tuple):
            return extra_keys
        salt, key = extra_keys
        return salt, self._adapters[key]


def describe_files(folder: Path) -> str:
    """What the files of a checkpoint are: another one differs in this."""
    files = sorted(each for each in folder.iterdir() if each.suffix in (".json", ".safetensors"))
    return repr([(each.name, *describe_file(each)) for each in files if each.is_file()])


def describe_file(file: Path) -> tuple[int, int, str]:
    """Size, time of change in ns, and 16 digits for the content: for NUM_PIECES pieces of it, from
    the first bytes to the last, and so for all of a small file. Raises OSError."""
    digest = hashlib.sha256()
    with open(file, "rb", buffering=0) as opened:
        found = os.fstat(opened.fileno())
        last = max(0, found.st_size - PIECE)
        for start in range(0, last + PIECE, max(PIECE, -(-last // (NUM_PIECES - 1)))):
            opened.seek(min(start, last))
            digest.update(opened.read(PIECE))
    return found.st_size, found.st_mtime_ns, digest.hexdigest()[:16]
