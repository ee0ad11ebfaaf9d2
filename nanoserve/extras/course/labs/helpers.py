"""What the behaviours of several labs share: sequences, pictures of blocks, random operations."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

from nanoserve.block_manager import BlockHash, BlockManager, BlockPool
from nanoserve.extras.course import later
from nanoserve.extras.course.spec import Wrong, must
from nanoserve.sampling_params import SamplingParams
from nanoserve.sequence import RequestMetrics, Sequence

TASKS = {"fork": ["4.6"], "swap": ["4.4", "4.5"]}  # which operations are somebody's task


def make_sequence(
    token_ids: Iterable[int], seq_id: int = 0, max_tokens: int = 100, **options: Any
) -> Sequence:
    """A sequence with this prompt."""
    return Sequence(
        seq_id=seq_id,
        request_id=f"r{seq_id}",
        prompt_token_ids=list(token_ids),
        sampling_params=options.pop("params", SamplingParams(max_tokens=max_tokens)),
        max_tokens=max_tokens,
        stop_token_ids=frozenset(),
        seed=0,
        metrics=RequestMetrics(0.0, 0.0),
        **options,
    )


def operate(manager: BlockManager, seq: Sequence, num_tokens: int) -> None:
    """What a step does with one sequence: append, and count the tokens as computed."""
    manager.append(seq, num_tokens)
    seq.num_computed_tokens += num_tokens


def let_find(pool: BlockPool, block: int, content: BlockHash) -> None:
    """What `cache` of lab 2 does."""
    if pool.block_hashes[block] is None:
        pool.block_hashes[block], pool.cached_blocks[content] = content, block


def show(manager: BlockManager) -> str:
    """The block map, behind a sentence."""
    lines = [
        f"\n  block {block}: {manager.pool.ref_counts[block]} references"
        + ("" if block not in manager.pool.free_queue else ", in the free queue")
        for block in range(manager.num_blocks)
    ]
    tables = [f"\n  block table of {seq_id}: {t}" for seq_id, t in manager.block_tables.items()]
    return "".join([*lines, *tables])


def audit(manager: BlockManager) -> None:
    """Raise Wrong unless reference counts, block tables and free queues agree. It looks at the
    fields itself and calls nothing that a student writes."""
    for pool, tables in (
        (manager.pool, manager.block_tables),
        (manager.cpu_pool, manager.swapped_tables),
    ):
        counted = [0] * pool.num_blocks
        for table in tables.values():
            for block in table:
                counted[block] += 1
        for block, (count, recorded) in enumerate(zip(counted, pool.ref_counts, strict=True)):
            must(
                count == recorded,
                f"block {block} is in {count} block tables and has {recorded} references"
                + show(manager),
            )
            is_queued = block in pool.free_queue
            must(
                is_queued == (count == 0),
                f"block {block} has {count} owners and is {'' if is_queued else 'not '}in the free "
                "queue" + show(manager),
            )


def audit_content(manager: BlockManager, live: list[Sequence]) -> None:
    """Raise Wrong unless each block of a sequence that can be found is named after the sequence's
    own tokens, up to its end."""
    for seq in live:
        for number, block in enumerate(manager.block_tables.get(seq.seq_id, ())):
            block_hash = manager.pool.block_hashes[block]
            tokens: list[int] = []
            while block_hash is not None and block_hash.parent is not None:
                tokens = [*block_hash.token_ids, *tokens]  # type: ignore[misc]
                block_hash = block_hash.parent
            end = (number + 1) * manager.block_size
            must(
                not tokens or tokens == seq.token_ids[:end],
                f"block {block} holds the tokens {seq.token_ids[:end]} of sequence {seq.seq_id}, "
                f"and is found as {tokens}",
            )


def try_random_operations(
    seed: int, num_rounds: int = 40, num_steps: int = 60, prefix: bool = False
) -> None:
    """Admit, append, fork, swap and free at random; what must hold is audited after each. prefix:
    also what each block that can be found holds."""
    rng, num_cached = random.Random(seed), 0
    for _ in range(num_rounds):
        size, num_blocks = rng.choice([1, 2, 4]), rng.randint(2, 12)
        manager = BlockManager(num_blocks, size, rng.random() < 0.8, num_cpu_blocks=num_blocks)
        live: list[Sequence] = []
        log: list[str] = []
        for number in range(num_steps):
            try:
                num_cached += step(manager, live, rng, number, log)
                audit(manager)
                if prefix:
                    audit_content(manager, live)
            except Wrong as error:
                history = "".join(f"\n  {entry}" for entry in log[-8:])
                raise Wrong(f"{error}\nThe last operations, block size {size}:{history}") from None
        for seq in live:
            manager.free(seq)
        audit(manager)
        free = manager.num_free_blocks
        must(free == num_blocks, f"all have ended, and {free} of {num_blocks} blocks are free")
    must(num_cached or not prefix, "many prompts begin alike, and no block was ever found")


def step(
    manager: BlockManager, live: list[Sequence], rng: random.Random, number: int, log: list[str]
) -> int:
    """One random operation. Returns how many blocks were found in the prefix cache."""
    running = [seq for seq in live if seq.seq_id in manager.block_tables]
    swapped = [seq for seq in live if seq.seq_id in manager.swapped_tables]
    choice = rng.choice(["admit", "append", "append", "append", "fork", "free", "swap"])
    if not later.HOLES.keys().isdisjoint(TASKS.get(choice, ())):
        return 0  # in a student's tree: a later lab brings it
    num_cached = 0
    if choice == "admit":
        length = rng.randint(1, 3 * manager.block_size)
        seq = make_sequence((rng.randrange(2) for _ in range(length)), seq_id=number)
        cached = manager.get_cached_blocks(seq)
        if manager.can_allocate(seq, cached):
            log.append(f"admit {number}: {seq.num_tokens} tokens, {len(cached)} blocks cached")
            manager.allocate(seq, cached)
            num_cached = len(cached)
            operate(manager, seq, seq.num_tokens - seq.num_computed_tokens)
            live.append(seq)
    elif choice == "append" and running:
        seq = rng.choice(running)
        if manager.can_append(seq, 1):
            log.append(f"append 1 token to {seq.seq_id}")
            seq.token_ids.append(rng.randrange(2))
            operate(manager, seq, 1)
            block = manager.block_tables[seq.seq_id][-1]
            owners = manager.pool.ref_counts[block]
            must(owners == 1, f"{seq.seq_id} writes into block {block}, which {owners} hold")
    elif choice == "fork" and running:
        parent = rng.choice(running)
        log.append(f"fork {parent.seq_id} -> {number}")
        child = make_sequence(parent.token_ids, seq_id=number)
        manager.fork(parent, child)
        live.append(child)
    elif choice == "free" and live:
        seq = live.pop(rng.randrange(len(live)))
        log.append(f"free {seq.seq_id}")
        manager.free(seq)
    elif choice == "swap" and (running or swapped):
        seq = rng.choice(running + swapped)
        if seq in running and manager.can_swap_out(seq):
            log.append(f"swap out {seq.seq_id}")
            manager.swap_out(seq)
        elif seq in swapped and manager.can_swap_in(seq):
            log.append(f"swap in {seq.seq_id}")
            manager.swap_in(seq)
    manager.take_copies()
    return num_cached
