"""Lab 9, Bug hunt: can a student write tests that find what is wrong in an engine?

    bug_hunt.py, the student's:   def test_blocks_are_rounded_up(): assert ...
      the right engine, twice      every test must pass, or nothing counts
      six engines with a mistake   each one that makes a test fail is a bug found

Which six is decided by the student's id and the lecturer's secret; no two are in one function. They
come from the bank of mutants.py, which can be extended by a lecturer's file in --hidden
(`LAB.exercise.bank.append(Mutant(...))`) or by `grade --bank FILE`. A student's tree has no bank:
there the tests run on the tree's own engine.

A test that hangs on a mutant has found it: on the right engine it ended in time. Tests use public
names only: a private name is how the engine does a thing, and a test is about what it does. Each
engine runs in a child within limits, and the student's file passes the screen first. No torch.

vLLM: none.
"""

from __future__ import annotations

import ast
import random
import secrets
from functools import partial
from pathlib import Path
from typing import Any

from nanoserve.extras.course.labs.quiz_0 import ANSWERS_FILE, empty_student, placeholder, who
from nanoserve.extras.course.spec import Behaviour, Exercise, Lab, Setting, Task, load_labs

FILE = "bug_hunt.py"
NUM_BUGS, MOST_TESTS = 6, 50
ENGINE_FILES = ("nanoserve/scheduler.py", "nanoserve/block_manager.py", "nanoserve/sequence.py")
LABS = (1, 2, 3, 4)  # whose functions have the mistakes: no torch
STARTER = '''"""Tests that find mistakes in an engine: functions test_..., public names only.

nanoserve/block_manager.py and nanoserve/scheduler.py say what is right. The fake executor
(nanoserve/tools/fake_executor.py) is a model whose next token is read out of the KV cache.
"""

from nanoserve.block_manager import BlockManager
from nanoserve.config import EngineConfig
from nanoserve.sampling_params import SamplingParams
from nanoserve.scheduler import Scheduler
from nanoserve.sequence import RequestMetrics, Sequence
from nanoserve.tools.fake_executor import FakeExecutor, reference_output


def make_sequence(token_ids, seq_id=0, max_tokens=5):
    return Sequence(
        seq_id=seq_id,
        request_id=str(seq_id),
        prompt_token_ids=list(token_ids),
        sampling_params=SamplingParams(max_tokens=max_tokens),
        max_tokens=max_tokens,
        stop_token_ids=frozenset(),
        seed=0,
        metrics=RequestMetrics(0.0, float(seq_id)),
    )


def run(prompts, **options):
    """What the engine makes of the prompts: seq_id -> token ids."""
    options = {"num_gpu_blocks_override": 32, "block_size": 4, "max_num_seqs": 8, **options}
    config = EngineConfig(max_num_batched_tokens=64, max_model_len=64, **options)
    executor = FakeExecutor(config)
    manager = BlockManager(executor.num_kv_blocks, 4, True, executor.num_cpu_blocks)
    scheduler = Scheduler(config, manager)
    for seq_id, prompt in enumerate(prompts):
        scheduler.add(make_sequence(prompt, seq_id))
    outputs = {}
    while scheduler.has_unfinished():
        step = scheduler.schedule()
        for update in scheduler.update_from_output(step, executor.execute_model(step)):
            outputs[update.sequence.seq_id] = update.sequence.output_token_ids
    return outputs


def test_one_request():
    assert run([range(10)])[0] == reference_output(list(range(10)), 5)
'''


class BugHunt(Exercise):
    """Six engines, one mistake in each."""

    def __init__(self) -> None:
        self.bank: list[Any] = []  # a lecturer's own Mutants, beside those of mutants.py

    def get_tasks(self, setting: Setting) -> list[Task]:
        task = Task("9.1", "", "bug hunt")
        task.behaviour(1, "all tests pass on the right engine")(placeholder("right_engine"))
        for number in range(1, NUM_BUGS + 1):
            task.behaviour(1.5, f"bug {number} is found")(placeholder(f"bug_{number}"))
        return [task]

    def get_files(self, setting: Setting) -> dict[str, str]:
        return {FILE: STARTER, ANSWERS_FILE: empty_student(setting.student)}

    def get_bugs(self) -> dict[str, list[tuple[Task, Any]]]:
        """Number of a task -> (function, mutant) of the bank, for those of LABS."""
        from nanoserve.extras.course.mutants import MUTANTS

        tasks = {task.number: task for lab in load_labs(LABS) for task in lab.tasks}
        found: dict[str, list[tuple[Task, Any]]] = {}
        for mutant in (*self.bank, *MUTANTS):
            if mutant.task in tasks:
                found.setdefault(mutant.task, []).append((tasks[mutant.task], mutant))
        return found

    def choose(self, student: str, secret: str) -> list[tuple[Task, Any]]:
        """(function, mutant) for each of a student's bugs, in different functions."""
        bugs = self.get_bugs()
        rng = random.Random(f"hunt {secret} {student}")
        return [rng.choice(bugs[number]) for number in rng.sample(sorted(bugs), NUM_BUGS)]

    def grade(self, lab: Lab, folder: Path, setting: Setting) -> list[Any]:
        from nanoserve.extras.course.grader import Outcome, read_own_file, refuse

        [task] = tasks = self.get_tasks(setting)
        try:
            source = read_own_file(folder, FILE, ENGINE_FILES, private=False)
            tests = find_tests(source)
            student = "" if setting.is_own else who(folder, setting)
        except ValueError as error:
            return refuse(lab, tasks, str(error))
        for _ in range(2):  # a test that only sometimes passes fails on one of them
            failure = try_engine(lab, source, tests)
            if failure is not None:
                sentence = f"on the right engine {failure}\nNo bug counts until it passes."
                return refuse(lab, tasks, sentence, "wrong")
        right, *bugs = task.behaviours
        outcomes = [Outcome(lab, task, right, "right")]
        if setting.is_own:
            said = "the engines with mistakes are at your lecturer's"
            return outcomes + [Outcome(lab, task, each, "missing", said) for each in bugs]
        for behaviour, (function, mutant) in zip(
            bugs, self.choose(student, setting.secret), strict=True
        ):
            failure = try_engine(lab, source, tests, (function, mutant))
            status, said = ("right", failure) if failure else ("wrong", "all your tests pass on it")
            outcomes.append(Outcome(lab, task, behaviour, status, said))
        return outcomes

    def prepare(self, job: dict[str, Any]) -> list[Behaviour]:
        from nanoserve.extras.course.child import define, graft

        if job["function"] is not None:
            number, module, name, mutated = job["function"]
            graft(Task(number, module, name), mutated)
        names = define(job["source"], FILE)
        return [Behaviour(name, name, 0, partial(names[name])) for name in job["names"]]


def find_tests(source: str) -> list[str]:
    """The functions test_... at the top of a file, in order. Raises ValueError with a sentence."""
    functions = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
    tests = [each.name for each in functions if each.name.startswith("test")]
    if not tests:
        raise ValueError(f"{FILE} has no function whose name begins with test.")
    if len(tests) > MOST_TESTS or len(set(tests)) < len(tests):
        raise ValueError(f"{FILE} may have {MOST_TESTS} tests, each with a name of its own.")
    for each in functions:
        if each.name in tests and (ast.unparse(each.args) or each.decorator_list):
            raise ValueError(f"{each.name} of {FILE} takes arguments, or has a decorator.")
    return tests


def try_engine(
    lab: Lab, source: str, tests: list[str], bug: tuple[Task, Any] | None = None
) -> str | None:
    """Which test fails on an engine and how, as a sentence; None if all pass."""
    from nanoserve.extras.course import grader, holes

    function = None
    if bug is not None:
        from nanoserve.extras.course.mutants import mutate  # a student's tree has none

        task, mutant = bug
        file = grader.ROOT / (task.module.replace(".", "/") + ".py")
        mutated = mutate(file.read_text(encoding="utf-8"), task.name, mutant)
        function = [task.number, task.module, task.name, holes.take(mutated, task.name)]
    job = {
        "nonce": secrets.token_hex(16),
        "lab": lab.number,
        "source": source,
        "function": function,
        "names": tests,
        "seed": 0,
        "seconds": lab.seconds,
        "megabytes": lab.memory,
        "hidden": {},
        "until_wrong": True,
    }
    begun, seen, ended = grader.run_child(job, 3 * lab.seconds + grader.START_SECONDS)
    for name in tests:
        if name not in seen:
            return f"{begun or 'the file'} was stopped: {ended}."
        status, message = seen[name]
        if status != "right":
            return f"{name} fails: {message.splitlines()[0] if message else status}"
    return None


HUNT = BugHunt()
LAB = Lab(9, "Bug hunt", [], seconds=4.0, exercise=HUNT)
