"""Lab 15, Variant of the term: a policy that no public solution has.

    $ nanoserve course make OUT --variant 2027a      variant.py: two classes to write, with numbers
    $ nanoserve course grade SUBMISSION --labs 15 --variant 2027a

The engine's own policies are public, and so are their solutions. So each term asks for two others
out of four, behind the engine's seams: a subclass in the place of the engine's class. The term's
name decides which two, and each one's parameter:

    Pool     (BlockPool)      evict the block that was used least often, up to N uses
    Victim   (Scheduler)      preempt the largest of the last N sequences, not the last one
    Reserve  (Scheduler)      admissions keep N tokens of the budget free while others decode
    Sharing  (BlockManager)   only the first N parts of a salt such as "adapter/user" decide

The students' file passes the screen, and runs in the child that grades tasks. No torch.

vLLM: none.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from nanoserve import block_manager
from nanoserve.block_manager import BlockManager, BlockPool
from nanoserve.extras.course.labs import board as boards
from nanoserve.extras.course.labs import helpers
from nanoserve.extras.course.labs.board import Board
from nanoserve.extras.course.labs.helpers import make_sequence, operate, try_random_operations
from nanoserve.extras.course.spec import Behaviour, Exercise, Lab, Setting, Task, Wrong, must
from nanoserve.scheduler import Scheduler

FILE, NUM_CHOSEN = "variant.py", 2
ENGINE_FILES = ("nanoserve/scheduler.py", "nanoserve/block_manager.py", "nanoserve/sequence.py")
CHOICES = {
    "Pool": range(2, 6),
    "Victim": range(2, 5),
    "Reserve": range(3, 9),
    "Sharing": range(1, 4),
}
BASES: dict[str, type] = {
    "Pool": BlockPool,
    "Victim": Scheduler,
    "Reserve": Scheduler,
    "Sharing": BlockManager,
}
SKELETONS = {
    "Pool": '''class Pool(BlockPool):
    """Evict the free block that was used least often.

    A block is used when it is allocated (then it counts 1 use, whatever it held before) and each
    time it is shared. More than {number} uses count as {number}. `allocate` takes the free block
    with the fewest uses; of several, the one that comes first in the free queue.
    """

    def __init__(self, num_blocks, *args, **options):
        super().__init__(num_blocks, *args, **options)
        raise NotImplementedError("15: Pool")
''',
    "Victim": '''class Victim(Scheduler):
    """When blocks run out, preempt the sequence that holds the most blocks.

    The candidates are the last {number} running sequences, of those behind `seq` in self.running
    (the ones before it are in this step already). Of several of one size, the last one. If nobody
    is behind `seq`, then `seq` itself, and the answer is False. Always by recompute (self.preempt).
    """

    def _preempt_until_fits(self, seq, num_tokens):
        raise NotImplementedError("15: Victim")
''',
    "Reserve": '''class Reserve(Scheduler):
    """A sequence that is admitted leaves {number} tokens of the step's budget unused.

    So its first step has at most step.budget - {number} tokens, or none if that is not above 0.
    But only while others run: if nothing runs, it may use the whole budget. All other limits stay.
    """

    def _num_tokens_to_admit(self, num_uncomputed, step):
        raise NotImplementedError("15: Reserve")
''',
    "Sharing": '''class Sharing(BlockManager):
    """Only the first {number} parts of cache_salt decide who shares cached blocks.

    A salt such as "adapter/team/user" has parts with "/" between them. Two sequences share the
    blocks of a common beginning exactly if the first {number} parts of their salts are equal.
    A salt with fewer parts is taken whole; None equals only None.
    """

    def _hashes_of(self, seq, num_blocks):
        raise NotImplementedError("15: Sharing")
''',
}
HEADER = '''"""The variant of term {term}: each class says what it does."""

from nanoserve.block_manager import BlockManager, BlockPool
from nanoserve.scheduler import Scheduler
'''


def choose(term: str) -> dict[str, int]:
    """The classes of a term and their parameters; without a term, all of them."""
    rng = random.Random(f"variant {term}")
    names = sorted(rng.sample(sorted(CHOICES), NUM_CHOSEN)) if term else list(CHOICES)
    return {name: rng.choice(CHOICES[name]) for name in names}


# -- Pool --


def fewest_uses(number: int) -> None:
    manager = BlockManager(3, 4)
    seqs = [make_sequence(range(100 * i, 100 * i + 4), seq_id=i) for i in range(3)]
    for seq in seqs:
        manager.allocate(seq, [])
        operate(manager, seq, 4)
    first, *others = [manager.block_tables[seq.seq_id][0] for seq in seqs]
    manager.pool.share(first)
    manager.pool.free(first)
    for seq in seqs:
        manager.free(seq)
    got = [manager.pool.allocate() for _ in range(3)]
    must(
        got == [*others, first],
        f"block {first} was used twice, the others once: {got} were evicted in turn",
    )


def uses_are_capped(number: int) -> None:
    pool = block_manager.BlockPool(2)
    first, second = pool.allocate(), pool.allocate()
    manager = BlockManager(1, 1)
    for block, uses in ((first, number + 3), (second, number)):
        for _ in range(uses - 1):
            pool.share(block)
        pool.cache(block, manager._hash_table.get(None, block))
    for block, uses in ((first, number + 3), (second, number)):
        for _ in range(uses):
            pool.free(block)
    got = pool.allocate()
    must(
        got == first,
        f"block {first} had {number + 3} uses and block {second} {number}: both count {number}, so "
        f"the one that is free for longer goes first. Block {got} was evicted",
    )


def new_content_counts_anew(number: int) -> None:
    pool = block_manager.BlockPool(2)
    manager = BlockManager(1, 1)
    first, second = pool.allocate(), pool.allocate()
    pool.share(second)
    pool.free(second)
    for block in (first, second):
        pool.cache(block, manager._hash_table.get(None, block))
        pool.free(block)
    again = pool.allocate()  # first, with one use
    pool.allocate()  # second: its new content has one use
    for block in (second, again):
        pool.cache(block, manager._hash_table.get(None, 10 + block))
        pool.free(block)
    got = pool.allocate()
    must(got == second, f"block {second} was allocated anew: its uses before do not count")


def pool_is_right(number: int, seed: int) -> None:
    try_random_operations(seed)


def pool_keeps_the_order(number: int, seed: int) -> None:
    """Beside a slow count of uses."""
    rng = random.Random(seed)
    for _ in range(30):
        pool = block_manager.BlockPool(rng.randint(2, 6))
        uses = [0] * pool.num_blocks
        hashes = BlockManager(1, 1)._hash_table
        live: list[int] = []
        for count in range(60):
            choice = rng.choice(["allocate", "share", "free", "free"])
            if choice == "allocate" and pool.free_queue:
                order = list(pool.free_queue)
                right = min(order, key=lambda block: min(uses[block], number))
                got = pool.allocate()
                must(
                    got == right,
                    f"free, in order: {order}; uses: {uses}: block {right} goes, not {got}",
                )
                uses[got] = 1
                if rng.random() < 0.7:
                    pool.cache(got, hashes.get(None, count))
                live.append(got)
            elif choice == "share":
                block = rng.choice(range(pool.num_blocks))
                if uses[block]:
                    pool.share(block)
                    uses[block] += 1
                    live.append(block)
            elif choice == "free" and live:
                pool.free(live.pop(rng.randrange(len(live))))


# -- Victim --


def largest_goes(number: int) -> None:
    board = Board(num_blocks=24, block_size=4, budget=96)
    board.add(8, 40)
    sizes = [9 + 8 * (i == 1) for i in range(number)]
    for size in sizes:
        board.add(size, 2)
    board.step(1)
    victims = wait_for_victim(board)
    must(victims == "C", f"C holds the most blocks; preempted: {victims}" + board.show())


def wait_for_victim(board: Board) -> str:
    """Take the free blocks away, so that A's next block needs a victim."""
    manager, first = board.manager, board.all[0]
    free = list(manager.pool.free_queue)
    holder = make_sequence(range(4 * len(free)), seq_id=99)
    manager.allocate(holder, [])
    operate(manager, holder, 4 * len(free))
    board.scheduler._preempt_until_fits(first, 8)
    return "".join(s.request_id for s in board.all if s.metrics.num_preemptions)


def only_the_last(number: int) -> None:
    board = Board(num_blocks=60, block_size=4, budget=256)
    board.add(8, 40)
    board.add(25, 9)
    for _ in range(number):
        board.add(9, 9)
    board.step(1)
    last = board.all[-1].request_id
    victims = wait_for_victim(board)
    must(
        victims == last,
        f"B is larger and not among the last {number}; of those, all alike, the last one goes, "
        f"{last}. Preempted: {victims}" + board.show(),
    )


def itself_if_last(number: int) -> None:
    board = Board(num_blocks=6, block_size=4)
    first, second = board.add(8, 9), board.add(7, 9)
    board.step(2)
    got = board.scheduler._preempt_until_fits(second, 9)
    must(got is False, f"nobody is behind B, so B gives way itself: the answer is {got!r}")
    names = [seq.request_id for seq in board.scheduler.running]
    must(names == ["A"], f"B had to give way itself; running: {names}")
    must(first.metrics.num_preemptions == 0, "A is in the step already")


def victim_is_right(number: int, seed: int) -> None:
    Board.try_random(seed, num_blocks=12)


# -- Reserve --


def leaves_tokens(number: int) -> None:
    board = Board(budget=24)
    board.add(4, 9)
    board.step(1)
    board.add(40, 3)
    got = board.num_scheduled(board.step())
    most = 23 - number
    must(got == {"A": 1, "B": most}, f"A decodes, 23 tokens are left, {number} stay unused: {got}")


def whole_if_alone(number: int) -> None:
    board = Board(budget=24)
    board.add(40, 3)
    got = board.num_scheduled(board.step())
    must(got == {"A": 24}, f"nothing runs, so the whole budget of 24 may be used: {got}")


def none_if_too_few(number: int) -> None:
    board = Board(budget=number + 1, max_num_seqs=2)
    board.add(1, 9)
    board.step(1)
    board.add(9, 3)
    got = board.num_scheduled(board.step())
    must(got == {"A": 1}, f"{number} tokens are left, {number} stay unused: B cannot start. {got}")


def keeps_other_limits(number: int) -> None:
    board = Board(budget=48, enable_chunked_prefill=False, max_model_len=48)
    board.add(4, 9)
    board.step(1)
    board.add(47 - number + 1, 1)
    got = board.num_scheduled(board.step())
    must(got == {"A": 1}, f"chunks are off, and B does not fit as a whole: {got}")
    board = Board(budget=48, long_prefill_token_threshold=5)
    board.add(4, 9)
    board.step(1)
    board.add(30, 1)
    got = board.num_scheduled(board.step())
    must(got == {"A": 1, "B": 5}, f"long_prefill_token_threshold is 5: {got}")


def reserve_is_right(number: int, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(12):
        board = Board(
            num_blocks=60, block_size=4, budget=rng.randint(number + 4, 40), max_num_seqs=4
        )
        for _ in range(rng.randint(1, 6)):
            board.add(rng.randint(1, 30), rng.randint(1, 8))
            if rng.random() < 0.5:
                board.step(1)
        board.finish()


# -- Sharing --


def count_hits(salts: tuple[str | None, str | None]) -> int:
    """Cached blocks that a second sequence with the same tokens finds."""
    manager = boards.BlockManager(16, 4)
    first, second = (
        make_sequence(range(13), seq_id=i, cache_salt=salt) for i, salt in enumerate(salts)
    )
    manager.allocate(first, [])
    operate(manager, first, 13)
    return len(manager.get_cached_blocks(second))


def parts_that_count(number: int) -> None:
    same = "/".join("abcd"[:number])
    for salts, hits in [
        ((same + "/x", same + "/y"), 3),
        ((same, same + "/y"), 3),
        ((same + "x", same + "y"), 0),
    ]:
        got = count_hits(salts)
        must(got == hits, f"salts {salts}: {hits} of 3 blocks should be found, and {got} are")


def earlier_parts_differ(number: int) -> None:
    for place in range(number):
        parts = list("abcd"[:number])
        other = [*parts[:place], "z", *parts[place + 1 :]]
        salts = "/".join([*parts, "u"]), "/".join([*other, "u"])
        got = count_hits(salts)
        must(got == 0, f"salts {salts} differ in part {place + 1}, and {got} blocks are shared")


def none_is_none(number: int) -> None:
    for salts, hits in [((None, None), 3), ((None, ""), 0), ((None, "a"), 0), (("a", "a"), 3)]:
        got = count_hits(salts)
        must(got == hits, f"salts {salts}: {hits} of 3 blocks should be found, and {got} are")


def sharing_is_right(number: int, seed: int) -> None:
    try_random_operations(seed, prefix=True)


def chain_still_counts(number: int) -> None:
    manager = boards.BlockManager(16, 4)
    first = make_sequence(range(13), seq_id=0, cache_salt="a/b/c/d")
    manager.allocate(first, [])
    operate(manager, first, 13)
    other = make_sequence([9, *range(1, 13)], seq_id=1, cache_salt="a/b/c/d")
    got = manager.get_cached_blocks(other)
    must(got == [], f"the first token differs, so no later block is found: {got}")


# points, title, check; those with a `seed` are properties
BEHAVIOURS: dict[str, list[tuple[float, str, Callable[..., None]]]] = {
    "Pool": [
        (1, "the block with the fewest uses is evicted", fewest_uses),
        (1, "uses are counted up to the limit", uses_are_capped),
        (1, "new content counts anew", new_content_counts_anew),
        (1, "no block is lost", pool_is_right),
        (1, "the same order as a slow count", pool_keeps_the_order),
    ],
    "Victim": [
        (1.5, "the largest gives way", largest_goes),
        (1.5, "only the last ones are asked; of several alike, the last", only_the_last),
        (1, "itself if nobody is behind", itself_if_last),
        (1, "the same tokens with 12 blocks as with 1,000", victim_is_right),
    ],
    "Reserve": [
        (1.5, "an admission leaves tokens unused", leaves_tokens),
        (1, "the whole budget if nothing runs", whole_if_alone),
        (1, "nobody starts if too few are left", none_if_too_few),
        (1, "chunk limits stay as they are", keeps_other_limits),
        (0.5, "the same tokens", reserve_is_right),
    ],
    "Sharing": [
        (1.5, "later parts do not count", parts_that_count),
        (1.5, "each earlier part counts", earlier_parts_differ),
        (0.5, "None equals only None", none_is_none),
        (0.5, "the parent still counts", chain_still_counts),
        (1, "each block is found as what it holds", sharing_is_right),
    ],
}


class Variants(Exercise):
    """The classes of a term."""

    def get_tasks(self, setting: Setting) -> list[Task]:
        tasks = []
        for name, number in choose(setting.term).items():
            task = Task(f"15.{1 + list(CHOICES).index(name)}", "", name)
            for points, title, check in BEHAVIOURS[name]:
                is_property = "seed" in check.__code__.co_varnames[: check.__code__.co_argcount]
                bound = partial(check, number)
                task.behaviours.append(Behaviour(check.__name__, title, points, bound, is_property))
            tasks.append(task)
        return tasks

    def get_files(self, setting: Setting) -> dict[str, str]:
        chosen = choose(setting.term)
        classes = [SKELETONS[name].format(number=number) for name, number in chosen.items()]
        return {FILE: "\n\n".join([HEADER.format(term=setting.term or "-"), *classes])}

    def grade(self, lab: Lab, folder: Path, setting: Setting) -> list[Any]:
        from nanoserve.extras.course.grader import read_own_file, refuse, run_behaviours

        tasks = self.get_tasks(setting)
        try:
            source = read_own_file(folder, FILE, ENGINE_FILES, private=True)
        except ValueError as error:
            return refuse(lab, tasks, str(error))
        more = {"term": setting.term}
        return [
            outcome
            for task in tasks
            for outcome in run_behaviours(lab, task, source, setting.seed, more)
        ]

    def prepare(self, job: dict[str, Any]) -> list[Behaviour]:
        from nanoserve.extras.course.child import define

        tasks = {task.number: task for task in self.get_tasks(Setting(term=job["term"]))}
        task = tasks[job["task"]]
        found, base = define(job["source"], FILE).get(task.name), BASES[task.name]
        if not (isinstance(found, type) and issubclass(found, base)):
            raise Wrong(f"{FILE} must have a class {task.name}({base.__name__}).")
        for module in (block_manager, boards, helpers):  # who builds one, by this name
            if hasattr(module, base.__name__):
                setattr(module, base.__name__, found)
        return [each for each in task.behaviours if each.name in job["names"]]


LAB = Lab(15, "Variant of the term", [], exercise=Variants())
