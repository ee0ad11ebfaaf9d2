"""What is a block called outside of this process?

In the engine a block's content has an interned object for a name (BlockHash), which is worth
nothing in another process. A *digest* is worth something there: SHA-256 of the parent's digest and
the block's own tokens. So one digest stands for the whole prefix, as vLLM's block hashes do.

    root       sha256(extra keys)                       the salt, and the adapter
    block 0    sha256(root's digest, "5 6 7 8")
    block 1    sha256(block 0's digest, "9 10 11 12")

The model is not in it: a tier puts that beside it (PrimaryTier.identity).

An adapter's number means nothing in another process either. In its place stands what its files are:
names, sizes and times of change.

vLLM: vllm/v1/core/kv_cache_utils.py hash_block_tokens, vllm/v1/kv_offload/file_mapper.py (V1).
"""

from __future__ import annotations

import hashlib
import secrets
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from nanoserve.block_manager import BlockHash
from nanoserve.sequence import Sequence


class BlockDigests:
    """BlockHash -> digest, computed once for each, and dropped with it."""

    def __init__(self) -> None:
        self._digests: WeakKeyDictionary[BlockHash, bytes] = WeakKeyDictionary()
        self._adapters: dict[int, str] = {}  # Adapter.key -> what its files are

    def note_adapter(self, seq: Sequence) -> None:
        """Before the first block of `seq`: know its adapter."""
        if seq.lora is not None and seq.lora.key not in self._adapters:
            try:
                name = describe_files(Path(seq.lora.request.path))
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
    """Name, size and time of change of each file of a checkpoint: another one differs in those."""
    files = sorted(each for each in folder.iterdir() if each.suffix in (".json", ".safetensors"))
    stats = [(each.name, each.stat()) for each in files]
    return repr([(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats])
