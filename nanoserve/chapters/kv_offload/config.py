"""Where may blocks go, and how many bytes of them?

Two options, as in vLLM. The short one is for main memory alone; kv_transfer_config is a dict (or
its JSON text, on the command line) with vLLM's keys. Three examples:

    LLM(kv_offloading_size=4)                                  4 GiB of main memory, over all ranks

    LLM(kv_transfer_config={                                   main memory, and a disk below it
        "kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": {
            "cpu_bytes_to_use": 4 * 2**30, "eviction_policy": "arc",
            "secondary_tiers": [{"type": "fs", "root_dir": "/data/kv", "max_bytes": 10**11}]}})

    LLM(kv_transfer_config={                                   a folder between two engines
        "kv_connector": "ExampleConnector", "kv_role": "kv_producer", "kv_connector_extra_config": {
            "shared_storage_path": "/data/kv"}})

kv_role says what an engine does with files: a kv_producer writes them, a kv_consumer reads them,
and kv_both is a cache that outlives the process. SharedStorageConnector is the older name of
ExampleConnector. max_bytes, the bound of the folder, is ours; without it a tenth of the disk.

vLLM: vllm/config/kv_transfer.py, vllm/v1/kv_offload/cpu/spec.py, tiering/spec.py (0.32).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from nanoserve.chapters.option_dict import OptionDict

# Connector -> the keys of its kv_connector_extra_config.
CONNECTORS = {
    "OffloadingConnector": ("cpu_bytes_to_use", "eviction_policy", "secondary_tiers"),
    "ExampleConnector": ("shared_storage_path", "max_bytes"),
    "SharedStorageConnector": ("shared_storage_path", "max_bytes"),
}
KEYS = ("kv_connector", "kv_role", "kv_connector_extra_config")
# Keys of vLLM's that change nothing here. (What cannot be loaded is computed.)
TUNES = {
    *("engine_id", "kv_buffer_device", "kv_buffer_size", "kv_rank", "kv_parallel_size", "kv_ip"),
    *("kv_port", "kv_load_failure_policy", "enable_permute_local_kv", "spec_name"),
    *("n_read_threads", "n_write_threads"),
}


@dataclass(frozen=True)
class KVTransferConfig(OptionDict):
    """What kv_transfer_config says. Raises ValueError for a value that is not allowed."""

    option = "kv_transfer_config"
    kv_role: Literal["kv_producer", "kv_consumer", "kv_both"]
    cpu_bytes_to_use: int | None = None  # of main memory, over all ranks
    eviction_policy: Literal["lru", "arc"] = "lru"  # of main memory
    root_dir: str | Path | None = None  # of the files; None: there are none
    max_bytes: int | None = None  # of all files in it; None: a tenth of the disk

    @classmethod
    def read(cls, value: Any) -> KVTransferConfig:
        """From a dict or its JSON text. A misspelt key is a TypeError, which names it."""
        given = json.loads(value) if isinstance(value, str) else value
        if isinstance(given, cls):
            return given
        given = read_keys("kv_transfer_config", given, KEYS)
        connector = given.get("kv_connector")
        if connector not in CONNECTORS:
            names = ", ".join(CONNECTORS)
            raise ValueError(f"kv_connector {connector!r} is not here; allowed: {names}.")
        extra = given.get("kv_connector_extra_config") or {}
        extra = read_keys("kv_connector_extra_config", extra, CONNECTORS[connector])
        tiers = extra.pop("secondary_tiers", None) or []
        if not isinstance(tiers, (list, tuple)) or len(tiers) > 1:
            raise ValueError(f"secondary_tiers must be a list of one dict, got {tiers!r}.")
        for tier in tiers:
            tier = read_keys("secondary_tiers", tier, ("type", "root_dir", "max_bytes"))
            if (kind := tier.pop("type", None)) != "fs" or "root_dir" not in tier:
                raise ValueError(f"a tier is a folder: type 'fs' and a root_dir, got {kind!r}.")
            extra |= tier
        if connector != "OffloadingConnector":  # /tmp is vLLM's
            extra["root_dir"] = extra.pop("shared_storage_path", "/tmp")
        return cls(given.get("kv_role"), **extra)  # type: ignore[arg-type]

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.root_dir is None and self.max_bytes is not None:
            raise ValueError("max_bytes bounds the files of a folder, and there is none.")

    @property
    def is_kv_producer(self) -> bool:
        return self.kv_role != "kv_consumer"

    @property
    def is_kv_consumer(self) -> bool:
        return self.kv_role != "kv_producer"


def read_keys(what: str, value: Any, allowed: Collection[str]) -> dict[str, Any]:
    """The allowed keys of a dict that are not None. Raises TypeError for one that is not known."""
    if not isinstance(value, Mapping):
        raise TypeError(f"{what} must be a dict, got {value!r}.")
    for name in value.keys() - {*allowed, *TUNES}:
        raise TypeError(f"{what} has no key {name!r}, but {', '.join(allowed)}.")
    return {name: each for name, each in value.items() if name in allowed and each is not None}
