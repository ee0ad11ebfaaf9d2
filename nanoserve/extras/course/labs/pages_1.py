"""Lab 1, Pages: who owns which block?

The functions of the block pool, and of the block tables on top of it. No torch.
"""

from __future__ import annotations

from nanoserve.block_manager import BlockHash, BlockManager, BlockPool
from nanoserve.extras.course.labs.helpers import let_find, make_sequence, operate, show
from nanoserve.extras.course.spec import Lab, Task, must

MODULE = "nanoserve.block_manager"
ALLOCATE = Task("1.1", MODULE, "BlockPool.allocate")
SHARE = Task("1.2", MODULE, "BlockPool.share")
FREE = Task("1.3", MODULE, "BlockPool.free")
NUM_BLOCKS = Task("1.4", MODULE, "BlockManager.num_blocks_for")
CAN_APPEND = Task("1.5", MODULE, "BlockManager.can_append")
CLOSE = Task("1.6", MODULE, "BlockManager.free")
LAB = Lab(1, "Pages", [ALLOCATE, SHARE, FREE, NUM_BLOCKS, CAN_APPEND, CLOSE])


# -- 1.1 --


@ALLOCATE.behaviour(1, "the block is yours: one reference, and no longer in the free queue")
def one_reference() -> None:
    pool = BlockPool(3)
    block = pool.allocate()
    must(block in range(3), f"allocate() returned {block!r}; the blocks are 0, 1 and 2")
    must(pool.ref_counts[block] == 1, f"block {block} has {pool.ref_counts[block]} references")
    must(block not in pool.free_queue, f"block {block} is allocated and still in the free queue")
    must(pool.num_free_blocks == 2, f"{pool.num_free_blocks} blocks are free, of 3 one is taken")


@ALLOCATE.behaviour(1, "it is the least recently used one: the front of the queue")
def oldest_first() -> None:
    pool = BlockPool(4)
    first = [pool.allocate() for _ in range(3)]
    must(first == [0, 1, 2], f"a new pool gave the blocks {first}; the queue was 0 1 2 3")
    parent = BlockHash(None, None)
    for block in (1, 0):
        let_find(pool, block, BlockHash(parent, (block,)))
        pool.free(block)
    queue = list(pool.free_queue)
    block = pool.allocate()
    must(block == queue[0], f"the queue was {queue}, oldest first; allocate() took {block}")


@ALLOCATE.behaviour(0.5, "its old content can no longer be found")
def forgets() -> None:
    pool = BlockPool(1)
    content = BlockHash(None, "a b c d")
    let_find(pool, pool.allocate(), content)
    pool.free(0)
    must(pool.cached_blocks.get(content) == 0, "the block was freed and should still be found")
    pool.allocate()
    must(
        content not in pool.cached_blocks,
        "block 0 is about to be overwritten, and a later request would still find a b c d in it",
    )


# -- 1.2 --


@SHARE.behaviour(1, "each share adds one reference")
def adds_one() -> None:
    pool = BlockPool(2)
    block = pool.allocate()
    pool.share(block)
    pool.share(block)
    count = pool.ref_counts[block]
    must(count == 3, f"allocated once and shared twice: 3 references, not {count}")


@SHARE.behaviour(1, "a free block that is shared leaves the free queue")
def leaves_queue() -> None:
    pool = BlockPool(3)
    content = BlockHash(None, "a b c d")
    block = pool.allocate()
    let_find(pool, block, content)
    pool.free(block)
    pool.share(block)
    must(
        block not in pool.free_queue,
        f"block {block} has a reader again and is in the free queue: the next allocate() would "
        "give it to somebody else",
    )
    must(pool.cached_blocks.get(content) == block, "a shared block must still be found")


# -- 1.3 --


@FREE.behaviour(1, "only the last reference frees the block")
def last_reference() -> None:
    pool = BlockPool(2)
    block = pool.allocate()
    pool.share(block)
    pool.free(block)
    must(pool.ref_counts[block] == 1, f"2 references, one dropped: {pool.ref_counts[block]} left?")
    must(block not in pool.free_queue, "one sequence still reads the block, and it is queued")
    pool.free(block)
    must(block in pool.free_queue, "nobody has the block, and it is not in the free queue")


@FREE.behaviour(1, "a block that can be found stays findable, at the end of the queue")
def found_later() -> None:
    pool = BlockPool(3)
    content = BlockHash(None, "a b c d")
    block = pool.allocate()
    let_find(pool, block, content)
    pool.free(block)
    queue = list(pool.free_queue)
    must(content in pool.cached_blocks, "freeing the block forgot its content: no prefix cache")
    must(queue[-1] == block, f"the queue is {queue}; block {block} was used last: it is the end")


@FREE.behaviour(1, "a block that cannot be found goes to the front, to be used next")
def useless_first() -> None:
    pool = BlockPool(3)
    block = pool.allocate()
    pool.free(block)
    queue = list(pool.free_queue)
    must(
        queue[0] == block,
        f"the queue is {queue}; block {block} holds nothing that anybody can find, so it should "
        "be taken before the blocks that a later request may use",
    )


# -- 1.4 --


@NUM_BLOCKS.behaviour(1, "a block that is begun counts whole")
def rounds_up() -> None:
    manager = BlockManager(8, 4)
    for num_tokens, expected in [(0, 0), (1, 1), (3, 1), (4, 1), (5, 2), (8, 2), (9, 3)]:
        got = manager.num_blocks_for(num_tokens)
        must(
            got == expected, f"{num_tokens} tokens in blocks of 4 need {expected} blocks, not {got}"
        )


# -- 1.5 --


@CAN_APPEND.behaviour(1, "True as long as the free blocks hold the new tokens, to the last one")
def exactly_full() -> None:
    manager = BlockManager(3, 4)
    seq = make_sequence(range(4))
    manager.allocate(seq, [])
    for num_tokens, expected in [(1, True), (12, True), (13, False)]:
        got = manager.can_append(seq, num_tokens)
        must(
            bool(got) == expected,
            f"3 free blocks of 4 tokens, nothing computed: can_append(seq, {num_tokens}) is {got}",
        )


@CAN_APPEND.behaviour(1, "room in the last block counts; a step may take many blocks")
def uses_what_it_has() -> None:
    manager = BlockManager(4, 4)
    seq = make_sequence(range(20))
    manager.allocate(seq, [])
    operate(manager, seq, 5)
    for num_tokens, expected in [(3, True), (11, True), (12, False)]:
        got = manager.can_append(seq, num_tokens)
        must(
            bool(got) == expected,
            f"5 tokens in 2 blocks of 4, 2 blocks free: can_append(seq, {num_tokens}) is {got}"
            + show(manager),
        )


@CAN_APPEND.behaviour(1, "a copy of a shared block takes a block, too")
def copy_takes_one() -> None:
    manager = BlockManager(3, 4)
    parent, child = make_sequence(range(6)), make_sequence(range(6), seq_id=1)
    manager.allocate(parent, [])
    operate(manager, parent, 6)
    manager.fork(parent, child)
    must(manager.can_append(child, 1), "one block is free for the copy" + show(manager))
    must(
        not manager.can_append(child, 3),
        "3 tokens need the copy and one block more; one block is free" + show(manager),
    )


# -- 1.6 --


@CLOSE.behaviour(1, "all its blocks are free, and the table is gone")
def gives_back() -> None:
    manager = BlockManager(4, 4)
    seq = make_sequence(range(10))
    manager.allocate(seq, [])
    operate(manager, seq, 10)
    manager.free(seq)
    must(manager.num_free_blocks == 4, f"{manager.num_free_blocks} of 4 blocks are free")
    must(seq.seq_id not in manager.block_tables, "the block table is still open")
    manager.free(seq)  # nothing is left to free


@CLOSE.behaviour(1, "the last block is reused first: beginnings are shared more often")
def tail_first() -> None:
    manager = BlockManager(3, 4)
    seq = make_sequence(range(12))
    manager.allocate(seq, [])
    operate(manager, seq, 12)
    table = list(manager.block_tables[seq.seq_id])
    for number, block in enumerate(table):
        let_find(manager.pool, block, BlockHash(None, number))
    manager.free(seq)
    queue = list(manager.pool.free_queue)
    must(
        queue == table[::-1],
        f"the block table was {table}, the free queue is {queue}. The first block of a prompt is "
        "the one that others may share: it should be taken last",
    )


@CLOSE.behaviour(0.5, "blocks of the CPU pool are given back, too")
def gives_back_swapped() -> None:
    manager = BlockManager(4, 4, num_cpu_blocks=4)
    seq = make_sequence(range(10))
    manager.allocate(seq, [])
    operate(manager, seq, 10)
    manager.swap_out(seq)
    manager.free(seq)
    free = manager.cpu_pool.num_free_blocks
    must(free == 4, f"{free} of 4 CPU blocks are free after a swapped sequence ended")


@CLOSE.behaviour(1, "no block is lost in any order of requests", is_property=True)
def no_block_is_lost(seed: int) -> None:
    from nanoserve.extras.course.labs.helpers import try_random_operations

    try_random_operations(seed)
