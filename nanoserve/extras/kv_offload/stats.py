"""How much went where?

Counters that only grow, under the names and labels of vLLM's metrics. extras/metrics shows them
beside its own (catalog.KV_CONNECTOR_COUNTERS); a notebook reads `connector.stats.counters`:

    ("vllm:kv_offload_store_bytes", "")                81920      from KV blocks to rows
    ("vllm:kv_offload_load_bytes", "")                 30720      from rows to KV blocks
    ("vllm:kv_offload_tiering_write_bytes", "fs")      81920      from rows to a tier below
    ("vllm:prompt_tokens_cached_by_source", "host")       12      tokens that a request found

`_time` counts the seconds of all transfers, which may run side by side.

Left out: histograms, and the share of rows that transfers use as a gauge.

vLLM: vllm/distributed/kv_transfer/kv_connector/v1/offloading/metrics.py,
vllm/v1/kv_offload/tiering/metrics.py (V1).
"""

from __future__ import annotations

from collections.abc import Iterable

OF_ALL = (
    "vllm:external_prefix_cache_queries",
    "vllm:external_prefix_cache_hits",
    "vllm:kv_offload_load_bytes",
    "vllm:kv_offload_store_bytes",
    "vllm:kv_offload_allocation_failure",
)
OF_EACH_TIER = (
    "vllm:kv_offload_tiering_chunk_queries",
    "vllm:kv_offload_tiering_chunk_hits",
    "vllm:kv_offload_tiering_read_bytes",
    "vllm:kv_offload_tiering_read_time",
    "vllm:kv_offload_tiering_write_bytes",
    "vllm:kv_offload_tiering_write_time",
    "vllm:kv_offload_tiering_promotion_job_failures",
    "vllm:kv_offload_tiering_cascade_job_failures",
)
BY_SOURCE = "vllm:prompt_tokens_cached_by_source"


class OffloadingConnectorStats:
    """Counters of one engine, from its beginning. One thread adds; any thread may read. Invariant:
    the keys never change after construction."""

    def __init__(self, tier_types: Iterable[str], sources: Iterable[str]) -> None:
        """tier_types: of the tiers below. sources: where a hit may come from."""
        keys = [(name, "") for name in OF_ALL]
        keys += [(name, kind) for name in OF_EACH_TIER for kind in dict.fromkeys(tier_types)]
        keys += [(BY_SOURCE, source) for source in dict.fromkeys(sources)]
        self.counters: dict[tuple[str, str], float] = dict.fromkeys(keys, 0)

    def add(self, name: str, number: float, label_value: str = "") -> None:
        """Let a counter grow; `name` without "vllm:"."""
        self.counters[f"vllm:{name}", label_value] += number
