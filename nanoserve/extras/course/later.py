"""How is lab 1 tried while lab 2 has holes?

In a student's tree the engine has the holes of all its labs, and the right functions are not
there. A check of lab 1 passes through functions of later labs: `BlockManager.append` asks whether a
shared block must be copied (lab 4), and lets full blocks be found (lab 2). So while lab 1 is tried,
a later hole is filled by what an engine does that lacks the feature:

    4.7  _must_copy       nobody shares a block          return False
    2.7  cache_blocks     there is no prefix cache       pass

Such a body is no solution: the behaviours of its own task see what is missing. A hole that has none
keeps its error; a behaviour that meets it is "waiting", and costs no points. Earlier labs are not
helped: whoever tries lab 2 has written lab 1. A lecturer's grading needs none of this.

vLLM: none.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager

from nanoserve.extras.course.child import find_function, graft, is_hole
from nanoserve.extras.course.spec import Task, load_labs

BODIES = {
    "2.1": "return BlockHash(parent, token_ids)",  # equal content is never the same object
    "2.2": "pass",
    "2.3": "self.cached_blocks.pop(self.block_hashes[block_id], None)",
    "2.5": "return []",
    "2.6": "return self.num_blocks_for(seq.num_tokens) <= self.pool.num_free_blocks",
    "2.7": "pass",
    "4.1": "return self.block_manager.can_append(seq, num_tokens)",
    "4.3": "self.running.remove(seq)",
    "4.7": "return False",
    "4.8": "return False",
}
HOLES: dict[str, str] = {}  # while a lab is tried: "4.6", not written yet -> what it raises


@contextmanager
def filled(lab_number: int) -> Iterator[None]:
    """For the time of a block of code, fill the holes of later labs, and note them in HOLES."""
    before = {}
    numbers = {int(number.partition(".")[0]) for number in BODIES}
    for lab in load_labs(number for number in sorted(numbers) if number > lab_number):
        for task in lab.tasks:
            function = find_function(task)
            if is_hole(task, function):
                HOLES[task.number] = task.message
                if task.number in BODIES:
                    before[function] = function.__code__
                    fill(task)
    try:
        yield
    finally:
        HOLES.clear()
        for function, code in before.items():
            function.__code__ = code


def fill(task: Task) -> None:
    """Let the engine's function have its body of BODIES."""
    parameters = ", ".join(inspect.signature(find_function(task)).parameters)
    name = task.name.rpartition(".")[2]
    graft(task, f"def {name}({parameters}):\n    {BODIES[task.number]}\n")
