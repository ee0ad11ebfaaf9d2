"""Lab 0, Trace quiz: can a student read a trace, and say what comes next?

    $ nanoserve course quiz 4711           prints the sheet of student 4711
    $ ... answers.json                     {"student": "4711", "1": 12, "2": 3, ...}
    $ nanoserve course grade SUBMISSION --labs 0

Three requests run on the engine's control plane with the fake model: the first steps are shown, ten
numbers about the later ones are asked. The student's id and the lecturer's secret decide lengths,
arrivals, block size and budget, so no two sheets are alike. An answer that is wrong in a known way
(the block instead of the slot) gets a sentence about it, never the right number. No torch.

A student's tree has holes, so it can neither make a sheet nor grade one: the lecturer does both.

vLLM: none.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nanoserve.extras.course.labs.board import Board
from nanoserve.extras.course.spec import Exercise, Lab, Setting, Task, Wrong, must

ANSWERS_FILE = "answers.json"
NUM_QUESTIONS, NUM_TRIES = 10, 1000
SHOWN, FEWEST_STEPS, MOST_STEPS = 2, 7, 16


@dataclass
class Question:
    """One number that is asked for."""

    text: str
    answer: int
    hints: dict[int, str] = field(default_factory=dict)  # a wrong answer -> what it mixes up

    def __post_init__(self) -> None:
        self.hints.pop(self.answer, None)


@dataclass
class Quiz:
    """One student's sheet."""

    student: str
    setting: str  # what runs, in Markdown
    trace: str  # the shown steps
    questions: list[Question]

    def sheet(self) -> str:
        """What is asked, in Markdown."""
        asked = "\n".join(f"{n}. {each.text}" for n, each in enumerate(self.questions, 1))
        title = f"# Trace quiz of {self.student}"
        return f"{title}\n\n{self.setting}\n\n```\n{self.trace}\n```\n\n{asked}"

    def describe(self) -> str:
        """The sheet, and where the answers go."""
        empty = empty_answers(self.student)
        return f"{self.sheet()}\n\nAnswer in {ANSWERS_FILE}:\n\n```json\n{empty}```\n"


@dataclass
class Frame:
    """One step of a run: what was scheduled, and what holds after it."""

    scheduled: dict[str, int]  # request -> tokens
    contexts: dict[str, int]  # request -> tokens in the KV cache, with those of this step
    tables: dict[str, list[int]]  # after the schedule, before anyone has ended
    num_held: int  # blocks, likewise


@dataclass
class Run:
    """All steps of one load."""

    board: Board
    prompts: dict[str, int]  # request -> prompt tokens
    lengths: dict[str, int]  # request -> tokens to make
    arrivals: dict[str, int]  # request -> before which step it arrives; the first step is 1
    shared: int  # tokens at the beginning of each prompt that are alike
    frames: list[Frame]
    first_tokens: dict[str, int]  # request -> the step that brought its first token


def run(rng: random.Random) -> Run:
    """A small load, step by step."""
    size = rng.choice([4, 5, 6, 8])
    budget = rng.randint(10, 18)
    board = Board(num_blocks=40, block_size=size, budget=budget, max_num_seqs=4)
    shared = size * rng.randint(1, 2) + rng.randint(0, size - 1)
    names = ["A", "B", "C"]
    prompts = {name: shared + rng.randint(1, 2 * size) for name in names}
    lengths = {name: rng.randint(3, 7) for name in names}
    arrivals = {"A": 1, "B": rng.randint(2, 3), "C": rng.randint(3, 4)}
    scatter(board, rng)
    result = Run(board, prompts, lengths, arrivals, shared, [], {})
    for number in range(1, 100):
        for name in names:
            if arrivals[name] == number:
                add(board, name, shared, prompts[name], lengths[name])
        before = {seq.request_id: seq.num_output_tokens for seq in board.all}
        step = board.scheduler.schedule()
        if step.is_empty:
            break
        tables = {
            seq.request_id: list(board.manager.block_tables.get(seq.seq_id, ()))
            for seq in board.all
        }
        by_id = {seq.seq_id: seq.request_id for seq in board.all}
        contexts = {
            by_id[item.seq_id]: item.num_computed_tokens + item.num_scheduled_tokens
            for item in step.scheduled
        }
        held = board.manager.num_blocks - board.manager.num_free_blocks
        frame = Frame(board.num_scheduled(step), contexts, tables, held)
        result.frames.append(frame)
        board.scheduler.update_from_output(step, board.executor.execute_model(step))
        for seq in board.all:
            if seq.num_output_tokens and not before[seq.request_id]:
                result.first_tokens[seq.request_id] = number
    return result


def scatter(board: Board, rng: random.Random) -> None:
    """Let the free queue have another order, so that a block table is not 0, 1, 2."""
    queue = board.manager.pool.free_queue
    order = list(queue)
    rng.shuffle(order)
    for block in order:
        queue.move_to_end(block)


def add(board: Board, name: str, shared: int, num_prompt: int, length: int) -> None:
    """Queue a request whose first `shared` tokens are those of the others."""
    seq = board.add(num_prompt, length, first=1)
    start = 100 * (ord(name) - ord("A") + 1)
    own = list(range(start, start + num_prompt - shared))
    seq.prompt_token_ids[shared:] = own
    seq.token_ids[shared:] = own


def is_worth_asking(found: Run) -> bool:
    """A prompt in chunks, a cache hit, enough steps, and all three in one step."""
    is_chunked = any(found.first_tokens[name] > found.arrivals[name] for name in "ABC")
    hits = [seq.num_cached_tokens for seq in found.board.all]
    return (
        FEWEST_STEPS <= len(found.frames) <= MOST_STEPS
        and is_chunked
        and hits[1] > 0
        and any(len(frame.scheduled) == 3 for frame in found.frames[SHOWN:])
    )


def make_quiz(student: str, secret: str = "") -> Quiz:
    """The sheet of one student, with its answers. Raises NotImplementedError in a tree with
    holes."""
    rng = random.Random(f"quiz {secret} {student}")
    found = run(rng)
    for _ in range(NUM_TRIES):
        if is_worth_asking(found):
            break
        found = run(rng)
    size, budget = found.board.manager.block_size, found.board.scheduler.token_budget
    rows = [
        f"{name}: {found.prompts[name]} prompt tokens, {found.lengths[name]} tokens to make, "
        f"arrives before step {found.arrivals[name]}"
        for name in "ABC"
    ]
    setting = (
        f"Blocks of {size} tokens, {found.board.manager.num_blocks} blocks, a token budget of "
        f"{budget} per step, max_num_seqs {found.board.scheduler.max_num_seqs}, prefix caching "
        "and chunked prefill on. Each step is read before the next one is scheduled.\n\n- "
        + "\n- ".join(rows)
        + f"\n\nThe first {found.shared} tokens of the three prompts are alike; all later ones "
        "differ. A request ends when its last token is made; that token is never computed."
    )
    lines = []
    for number, frame in enumerate(found.frames[:SHOWN], start=1):
        did = ", ".join(f"{name} {count}" for name, count in frame.scheduled.items())
        lines.append(f"step {number}   tokens: {did}")
        lines += [f"         block table of {n}: {t}" for n, t in frame.tables.items() if t]
    return Quiz(student, setting, "\n".join(lines), ask(found, rng))


def ask(found: Run, rng: random.Random) -> list[Question]:
    """Ten questions about a run."""
    size, frames = found.board.manager.block_size, found.frames
    seqs = {seq.request_id: seq for seq in found.board.all}
    [full, *_] = [n for n in range(SHOWN, len(frames)) if len(frames[n].scheduled) == 3]
    late = rng.randrange(SHOWN, len(frames) - 2)
    name = rng.choice(["B", "C"])
    token = rng.randrange(1, min(found.prompts["A"], frames[SHOWN - 1].contexts["A"]))
    table = frames[SHOWN - 1].tables["A"]
    block = table[token // size]
    wait = found.first_tokens[name] - found.arrivals[name] + 1
    computed = sum(each.scheduled.get(name, 0) for each in frames)
    hit = seqs["B"].num_cached_tokens
    total, held = sum(frames[full].scheduled.values()), frames[full].num_held
    in_tables = sum(map(len, frames[full].tables.values()))
    read = sum(frames[late].contexts.values())
    last = frames[-1].contexts
    ends = max(last, key=lambda each: last[each])
    return [
        Question(
            f"After step {SHOWN}, in which slot of the KV cache are the keys of A's token {token}? "
            "(Its first token is token 0.)",
            block * size + token % size,
            {block: "that is the block; a slot counts tokens", token: "that is the position"},
        ),
        Question(
            f"How many tokens does step {full + 1} compute in all?",
            total,
            {3: "a chunk has more than one token"},
        ),
        Question(
            "How many of B's prompt tokens come from the prefix cache?",
            hit,
            {found.shared: "only full blocks are found", hit // size: "those are blocks"},
        ),
        Question(
            f"How many steps does {name} wait for its first token? Count the step before which it "
            "arrives as 1, and the one that brings the token, too.",
            wait,
            {found.prompts[name]: "TTFT is counted in steps here, not in tokens"},
        ),
        Question(
            f"How many tokens does {name} compute, from its first step to its last?",
            computed,
            {
                computed + 1: "the last token is made and never computed",
                found.prompts[name] + found.lengths[name] - 1: "what is cached is not computed",
            },
        ),
        Question(
            f"How many different blocks do the three block tables hold in step {full + 1}?",
            held,
            {in_tables: "a shared block is one block"},
        ),
        Question(
            "Which is the last step that computes a token of A?",
            max(n for n, each in enumerate(frames, 1) if "A" in each.scheduled),
        ),
        Question(
            f"Each sequence of a step reads the keys of its whole context once, those of this "
            f"step's tokens included. How many tokens' keys are read in step {late + 1}, in all?",
            read,
            {sum(frames[late].scheduled.values()): "those are the tokens that are computed"},
        ),
        Question(
            "Which is the last step?",
            len(frames),
        ),
        Question(
            f"How many blocks does {ends} hold in the last step?",
            len(frames[-1].tables[ends]),
        ),
    ]


def empty_answers(student: str) -> str:
    """The file that a student fills in."""
    numbers = {str(number): None for number in range(1, NUM_QUESTIONS + 1)}
    return json.dumps({"student": student, **numbers}, indent=1) + "\n"


def empty_student(student: str) -> str:
    """The same for a lab that only has to know who it is."""
    return json.dumps({"student": student}) + "\n"


def read_answers(folder: Path) -> dict[str, Any]:
    """answers.json of a submission. Raises ValueError with a sentence."""
    from nanoserve.extras.course.grader import read_text

    text = read_text(folder, ANSWERS_FILE)
    try:
        answers = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{ANSWERS_FILE} is no JSON: {error}") from error
    if not isinstance(answers, dict) or not isinstance(answers.get("student"), str):
        raise ValueError(f'{ANSWERS_FILE} must look like {{"student": "4711", "1": 12, ...}}.')
    return answers


def who(folder: Path, setting: Setting) -> str:
    """The student of a submission. Raises ValueError with a sentence."""
    student = setting.student or read_answers(folder)["student"]
    if not student:
        raise ValueError(f'{ANSWERS_FILE} says no "student": put your id there.')
    return student


def whose(folder: Path, setting: Setting, metadata: Path | None) -> str:
    """Whose sheet it is, and who has handed it in, as a sentence; "" if it does not say. metadata:
    submission_metadata.json of Gradescope, if there is one."""
    try:
        student = who(folder, setting)
    except ValueError:
        return ""
    sheet = f"The sheet of {student[:99]!r} was graded"
    try:
        users = json.loads(metadata.read_text(encoding="utf-8"))["users"] if metadata else []
        names = {str(user[key]) for user in users for key in ("email", "id", "sid") if key in user}
    except (OSError, ValueError, LookupError, TypeError) as error:
        return f"{sheet}; who has handed it in cannot be read: {error!r}."
    if not names:
        return f"{sheet}."
    known = names | {name.partition("@")[0] for name in names}
    if student.lower() in {name.lower() for name in known}:
        return f"{sheet}, and the same student has handed it in."
    return f"{sheet}. It was handed in by {', '.join(sorted(names))}: is that the same student?"


class TraceQuiz(Exercise):
    """Ten numbers."""

    def get_tasks(self, setting: Setting) -> list[Task]:
        task = Task("0.1", "", "trace quiz")
        for number in range(1, NUM_QUESTIONS + 1):
            task.behaviour(0.5, f"question {number}")(placeholder(f"question_{number}"))
        return [task]

    def get_files(self, setting: Setting) -> dict[str, str]:
        return {ANSWERS_FILE: empty_answers(setting.student)}

    def grade(self, lab: Lab, folder: Path, setting: Setting) -> list[Any]:
        from nanoserve.extras.course.grader import Outcome, refuse

        tasks = self.get_tasks(setting)
        try:
            answers, student = read_answers(folder), who(folder, setting)
        except ValueError as error:
            return refuse(lab, tasks, str(error))
        if setting.is_own:
            given = sum(type(answers.get(str(n + 1))) is int for n in range(NUM_QUESTIONS))
            said = f"{given} of {NUM_QUESTIONS} are answered; your lecturer has the right numbers"
            return refuse(lab, tasks, said, "missing")
        questions = make_quiz(student, setting.secret).questions
        outcomes = []
        for number, (question, behaviour) in enumerate(
            zip(questions, tasks[0].behaviours, strict=True), start=1
        ):
            status, message = judge(question, answers.get(str(number)))
            outcomes.append(Outcome(lab, tasks[0], behaviour, status, message))
        return outcomes


def placeholder(name: str) -> Any:
    """For a behaviour that an exercise grades as a whole."""

    def check() -> None:
        raise Wrong("graded by the exercise")

    check.__name__ = name
    return check


def judge(question: Question, given: object) -> tuple[str, str]:
    """(status, message) for one answer."""
    if given is None:
        return "missing", "not answered yet"
    if type(given) is not int:
        return "wrong", f"the answer is a whole number, not {str(given)[:50]!r}"
    if given == question.answer:
        return "right", ""
    hint = question.hints.get(given)
    return "wrong", f"{question.text}\n{given} is not right" + (f": {hint}." if hint else ".")


def check(student: str, number: int, given: object) -> None:
    """For a cell of a notebook: raise Wrong unless this answers the question, counted from 1."""
    status, message = judge(make_quiz(student).questions[number - 1], given)
    must(status == "right", message)


LAB = Lab(0, "Trace quiz", [], exercise=TraceQuiz())
