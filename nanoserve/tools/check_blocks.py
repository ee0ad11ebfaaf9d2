"""Do reference counts, block tables and the free queue agree? For tests, and for exercises."""

from nanoserve.block_manager import BlockManager


def check_blocks(manager: BlockManager) -> None:
    """Raise AssertionError unless reference counts agree with block tables, the free queue with
    reference counts, and the two directions of the hash map with each other. A manager may have
    `groups`, each with tables of its own, in which a negative number is no block."""
    groups: list[BlockManager] = getattr(manager, "groups", [manager])
    for pool, name in ((manager.pool, "block_tables"), (manager.cpu_pool, "swapped_tables")):
        counted, by_group = [0] * pool.num_blocks, [getattr(group, name) for group in groups]
        for tables in by_group:
            assert tables.keys() == by_group[0].keys(), f"{name} of other sequences in one group"
            for block_table in tables.values():
                held = [block_id for block_id in block_table if block_id >= 0]
                assert len(set(held)) == len(held), f"block twice in {block_table}"
                for block_id in held:
                    counted[block_id] += 1
        assert counted == pool.ref_counts, f"counted {counted}, recorded {pool.ref_counts}"
        free = {block_id for block_id, count in enumerate(counted) if count == 0}
        assert free == set(pool.free_queue), f"free {free}, queued {set(pool.free_queue)}"
        found = {h: block_id for block_id, h in enumerate(pool.block_hashes) if h is not None}
        assert found == pool.cached_blocks, "hash map and blocks disagree"
    both = manager.block_tables.keys() & manager.swapped_tables.keys()
    assert not both, f"sequences {both} are in both pools"
