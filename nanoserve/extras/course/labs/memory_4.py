"""Lab 4, Memory pressure: who gives way when blocks run out, and who copies before writing?

Preemption by recompute and by swap; forks and copy-on-write. No torch.
"""

from __future__ import annotations

from nanoserve.block_manager import BlockManager
from nanoserve.extras.course.labs.board import Board
from nanoserve.extras.course.labs.helpers import make_sequence, operate, show, try_random_operations
from nanoserve.extras.course.spec import Lab, Task, must
from nanoserve.sequence import SequenceStatus

BLOCKS, SCHEDULER = "nanoserve.block_manager", "nanoserve.scheduler"
MAKE_ROOM = Task("4.1", SCHEDULER, "Scheduler._preempt_until_fits")
PREEMPT = Task("4.2", SCHEDULER, "Scheduler.preempt")
REMOVE = Task("4.3", SCHEDULER, "Scheduler._remove")
SWAP_OUT = Task("4.4", BLOCKS, "BlockManager.swap_out")
SWAP_IN = Task("4.5", BLOCKS, "BlockManager.swap_in")
FORK = Task("4.6", BLOCKS, "BlockManager.fork")
MUST_COPY = Task("4.7", BLOCKS, "BlockManager._must_copy")
COPY = Task("4.8", BLOCKS, "BlockManager.copy_on_write")
LAB = Lab(
    4,
    "Memory pressure",
    [MAKE_ROOM, PREEMPT, REMOVE, SWAP_OUT, SWAP_IN, FORK, MUST_COPY, COPY],
)


# -- 4.1 --


@MAKE_ROOM.behaviour(1, "the least urgent running sequence is preempted, not the oldest")
def last_one() -> None:
    board = Board(num_blocks=6, block_size=4)
    board.add(8, 12)
    board.add(8, 12)
    board.add(6, 12)
    board.run_until(lambda: any(s.metrics.num_preemptions for s in board.all))
    preempted = [seq.request_id for seq in board.all if seq.metrics.num_preemptions]
    must(
        preempted == ["C"],
        f"A, B and C arrived in this order and the blocks ran out: {preempted} was preempted, "
        "and C is the one that has waited the shortest" + board.show(),
    )


@MAKE_ROOM.behaviour(1, "no more are preempted than have to be")
def only_one() -> None:
    board = Board(num_blocks=6, block_size=4)
    for _ in range(3):
        board.add(8, 12)
    board.run_until(lambda: any(s.metrics.num_preemptions for s in board.all))
    number = sum(seq.metrics.num_preemptions for seq in board.all)
    must(number == 1, f"one block was missing, and {number} sequences were preempted")


@MAKE_ROOM.behaviour(0.5, "a sequence that has to give way itself is told so")
def itself() -> None:
    board = Board(num_blocks=6, block_size=4)
    first, second = board.add(8, 9), board.add(7, 9)
    board.step(2)
    got = board.scheduler._preempt_until_fits(second, 9)
    must(got is False, f"the last of the list was preempted itself; the answer is {got!r}")
    must(second.status is SequenceStatus.WAITING, f"it is {second.status.value}")
    must(first.status is SequenceStatus.RUNNING, f"the first one is {first.status.value}")


# -- 4.2 --


@PREEMPT.behaviour(1, "its blocks are free again")
def blocks_are_free() -> None:
    board = Board(num_blocks=8, block_size=4)
    seq = board.add(10, 5)
    board.step(1)
    board.scheduler.preempt(seq)
    free = board.manager.num_free_blocks
    must(free == 8, f"the only sequence was preempted, and {free} of 8 blocks are free")


@PREEMPT.behaviour(1, "none of its tokens count as computed any more")
def nothing_computed() -> None:
    board = Board(num_blocks=8, block_size=4)
    seq = board.add(10, 5)
    board.step(2)
    board.scheduler.preempt(seq)
    number = seq.num_computed_tokens
    must(number == 0, f"its keys and values are gone, and {number} tokens count as computed")


@PREEMPT.behaviour(1, "it waits at the place of its arrival, before those who came later")
def before_later_ones() -> None:
    board = Board(num_blocks=64, block_size=4, max_num_seqs=1)
    first = board.add(4, 5)
    board.step(1)
    board.add(4, 5)
    board.add(4, 5)
    board.scheduler.preempt(first)
    names = [seq.request_id for seq in board.scheduler.waiting]
    must(names == ["A", "B", "C"], f"A came first and was preempted; the queue is {names}")
    must(first.status is SequenceStatus.WAITING, f"its status is {first.status.value}")
    must(first.metrics.num_preemptions == 1, "metrics.num_preemptions does not count it")


@PREEMPT.behaviour(1, "the same tokens with 12 blocks as with 1,000", is_property=True)
def same_tokens(seed: int) -> None:
    Board.try_random(seed, num_blocks=12)


# -- 4.3 --


@REMOVE.behaviour(1, "the runner is told that it may drop the row")
def runner_is_told() -> None:
    board = Board(num_blocks=8, block_size=4)
    seq = board.add(6, 5)
    board.step(1)
    board.scheduler.preempt(seq)
    step = board.scheduler.schedule()
    must(
        seq.seq_id in step.finished_seq_ids,
        "a sequence was preempted, and the next step does not name it in finished_seq_ids: the "
        "runner keeps its row for ever",
    )
    must(
        [new.seq_id for new in step.new_sequences] == [seq.seq_id],
        "the runner dropped the row, and the step does not send the sequence again",
    )


@REMOVE.behaviour(0.5, "it does not run any more")
def not_running() -> None:
    board = Board(num_blocks=8, block_size=4)
    first, second = board.add(6, 5), board.add(6, 5)
    board.step(1)
    board.scheduler._remove(first)
    names = [seq.request_id for seq in board.scheduler.running]
    must(names == ["B"], f"A was removed; running are {names}")
    board.scheduler._remove(second)
    must(not board.scheduler.running, "B was removed, too")


# -- 4.4 and 4.5 --


@SWAP_OUT.behaviour(1, "its KV blocks are free, its CPU blocks are its own")
def moves_out() -> None:
    manager = BlockManager(4, 4, num_cpu_blocks=4)
    seq = make_sequence(range(10))
    manager.allocate(seq, [])
    operate(manager, seq, 10)
    manager.swap_out(seq)
    must(manager.num_free_blocks == 4, f"{manager.num_free_blocks} of 4 KV blocks are free")
    must(seq.seq_id not in manager.block_tables, "its block table is still open")
    table = manager.swapped_tables.get(seq.seq_id)
    must(table is not None and len(table) == 3, f"its table of CPU blocks is {table}")


@SWAP_OUT.behaviour(1, "the copies are (KV block, CPU block), in the order of the table")
def pairs_out() -> None:
    manager = BlockManager(8, 4, num_cpu_blocks=4)
    manager.pool.allocate()  # so that block ids of the two pools differ
    manager.pool.allocate()
    seq = make_sequence(range(10))
    manager.allocate(seq, [])
    operate(manager, seq, 10)
    table = list(manager.block_tables[seq.seq_id])
    manager.swap_out(seq)
    pairs = manager.take_copies().swap_out
    expected = tuple(zip(table, manager.swapped_tables[seq.seq_id], strict=True))
    must(set(pairs) == set(expected), f"block table {table}; the copies are {pairs}")


@SWAP_IN.behaviour(1, "its CPU blocks are free, it has a block table again")
def moves_in() -> None:
    manager = BlockManager(4, 4, num_cpu_blocks=4)
    seq = make_sequence(range(10))
    manager.allocate(seq, [])
    operate(manager, seq, 10)
    manager.swap_out(seq)
    manager.swap_in(seq)
    must(manager.cpu_pool.num_free_blocks == 4, "its CPU blocks are not free")
    must(len(manager.block_tables.get(seq.seq_id, ())) == 3, "it has no block table of 3 blocks")
    must(seq.seq_id not in manager.swapped_tables, "it is still in swapped_tables")


@SWAP_IN.behaviour(1, "the copies are (CPU block, KV block)")
def pairs_in() -> None:
    manager = BlockManager(8, 4, num_cpu_blocks=8)
    for _ in range(3):
        manager.cpu_pool.allocate()
    seq = make_sequence(range(10))
    manager.allocate(seq, [])
    operate(manager, seq, 10)
    manager.swap_out(seq)
    cpu_table = list(manager.swapped_tables[seq.seq_id])
    manager.take_copies()
    manager.swap_in(seq)
    pairs = manager.take_copies().swap_in
    expected = tuple(zip(cpu_table, manager.block_tables[seq.seq_id], strict=True))
    must(pairs == expected, f"from CPU blocks {cpu_table}; the copies are {pairs}, not {expected}")


@SWAP_IN.behaviour(0.5, "the same tokens when everything is swapped", is_property=True)
def same_tokens_swapped(seed: int) -> None:
    Board.try_random(seed, num_blocks=12, preemption_mode="swap")


@SWAP_OUT.behaviour(0.5, "the same tokens when everything is swapped", is_property=True)
def same_tokens_swapped_out(seed: int) -> None:
    Board.try_random(seed, num_blocks=12, preemption_mode="swap")


# -- 4.6 --


@FORK.behaviour(1, "parent and child share the blocks: one reference more each")
def shares() -> None:
    manager = BlockManager(4, 4)
    parent, child = make_sequence(range(6)), make_sequence(range(6), seq_id=1)
    manager.allocate(parent, [])
    operate(manager, parent, 6)
    manager.fork(parent, child)
    tables = manager.block_tables
    must(tables[1] == tables[0], f"the tables are {tables}")
    counts = [manager.pool.ref_counts[block] for block in tables[0]]
    must(counts == [2, 2], f"two sequences read these blocks; the references are {counts}")
    must(child.num_computed_tokens == 6, f"{child.num_computed_tokens} tokens of the child count")


@FORK.behaviour(1, "each has a table of its own")
def own_table() -> None:
    manager = BlockManager(6, 4)
    parent, child = make_sequence(range(8)), make_sequence(range(8), seq_id=1)
    manager.allocate(parent, [])
    operate(manager, parent, 8)
    manager.fork(parent, child)
    child.token_ids.append(9)
    operate(manager, child, 1)
    lengths = [len(manager.block_tables[i]) for i in (0, 1)]
    must(
        lengths == [2, 3],
        f"the child got one block more; the tables have {lengths} blocks" + show(manager),
    )


@FORK.behaviour(0.5, "the child keeps the block hashes")
def keeps_hashes() -> None:
    manager = BlockManager(6, 4)
    parent, child = make_sequence(range(8)), make_sequence(range(8), seq_id=1)
    manager.allocate(parent, [])
    operate(manager, parent, 8)
    manager.fork(parent, child)
    must(child.block_hashes == parent.block_hashes, "the child does not know its block hashes")
    must(child.block_hashes is not parent.block_hashes, "both write into one list of hashes")


# -- 4.7 --


@MUST_COPY.behaviour(1, "only a shared block that is partly filled is copied")
def partly_filled_and_shared() -> None:
    for length, forks, expected in [(6, 1, True), (8, 1, False), (6, 0, False)]:
        manager = BlockManager(8, 4)
        parent = make_sequence(range(length))
        manager.allocate(parent, [])
        operate(manager, parent, length)
        for number in range(forks):
            manager.fork(parent, make_sequence(range(length), seq_id=number + 1))
        got = manager._must_copy(parent)
        must(
            bool(got) == expected,
            f"{length} tokens in blocks of 4, {forks + 1} owners: _must_copy is {got}"
            + show(manager),
        )


# -- 4.8 --


@COPY.behaviour(1, "the writer gets a block of its own, the others keep the old one")
def own_block() -> None:
    manager = BlockManager(6, 4)
    parent, child = make_sequence(range(6)), make_sequence(range(6), seq_id=1)
    manager.allocate(parent, [])
    operate(manager, parent, 6)
    manager.fork(parent, child)
    before = list(manager.block_tables[0])
    child.token_ids.append(9)
    operate(manager, child, 1)
    must(manager.block_tables[0] == before, "the parent's table changed")
    own = manager.block_tables[1]
    must(own[0] == before[0] and own[1] != before[1], f"parent {before}, child {own}")
    counts = [manager.pool.ref_counts[block] for block in (before[1], own[1])]
    must(counts == [1, 1], f"old block and copy have {counts} references, one each is right")


@COPY.behaviour(1, "the copy is (shared block, own block), before the step writes")
def pair_is_pending() -> None:
    manager = BlockManager(6, 4)
    parent, child = make_sequence(range(6)), make_sequence(range(6), seq_id=1)
    manager.allocate(parent, [])
    operate(manager, parent, 6)
    manager.fork(parent, child)
    shared = manager.block_tables[0][1]
    child.token_ids.append(9)
    operate(manager, child, 1)
    pairs = manager.take_copies().copy_on_write
    expected = ((shared, manager.block_tables[1][1]),)
    must(pairs == expected, f"the copies are {pairs}; they should be {expected}")


@COPY.behaviour(0.5, "it says whether it copied")
def says_so() -> None:
    manager = BlockManager(6, 4)
    parent, child = make_sequence(range(6)), make_sequence(range(6), seq_id=1)
    manager.allocate(parent, [])
    operate(manager, parent, 6)
    must(manager.copy_on_write(parent) is False, "nothing is shared, so nothing is copied")
    manager.fork(parent, child)
    must(manager.copy_on_write(child) is True, "a shared block was copied: the answer is True")


@COPY.behaviour(1, "every reference is counted, in any order", is_property=True)
def all_counted(seed: int) -> None:
    try_random_operations(seed)


@FORK.behaviour(0.5, "every reference is counted, in any order", is_property=True)
def forks_counted(seed: int) -> None:
    try_random_operations(seed)
