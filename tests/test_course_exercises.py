"""The labs without holes: a trace quiz, a bug hunt, a policy contest, the variants of a term."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

pytest.importorskip("nanoserve.extras.course.cli")

from course_sample import sample

from nanoserve.__main__ import main
from nanoserve.extras.course import exports, make
from nanoserve.extras.course.grader import ROOT, Outcome, grade
from nanoserve.extras.course.labs import contest_10, hunt_9, quiz_0, variant_15
from nanoserve.extras.course.mutants import Mutant, mutate
from nanoserve.extras.course.spec import Lab, Setting, Task, load_labs
from nanoserve.scheduler import Scheduler


def outcomes_of(lab: Lab, folder: Path, **setting: object) -> list[Outcome]:
    return grade([lab], folder, seed=1, setting=Setting(**setting)).outcomes  # type: ignore[arg-type]


def score(outcomes: list[Outcome]) -> float:
    return sum(each.score for each in outcomes)


def said(outcomes: list[Outcome]) -> str:
    return "\n".join(each.message for each in outcomes)


def write(folder: Path, name: str, text: str) -> Path:
    (folder / name).write_text(text, encoding="utf-8")
    return folder


# -- lab 0 --


def hand_in(folder: Path, answers: dict[str, object]) -> Path:
    return write(folder, quiz_0.ANSWERS_FILE, json.dumps(answers))


def right_answers(student: str, secret: str = "") -> dict[str, object]:
    questions = quiz_0.make_quiz(student, secret).questions
    return {"student": student} | {str(n): each.answer for n, each in enumerate(questions, 1)}


def test_right_answers_earn_all_points_of_the_student_who_was_asked(tmp_path: Path) -> None:
    hand_in(tmp_path, right_answers("ada", "s"))
    assert score(outcomes_of(quiz_0.LAB, tmp_path, secret="s")) == 5
    assert score(outcomes_of(quiz_0.LAB, tmp_path, secret="other")) < 5
    assert score(outcomes_of(quiz_0.LAB, tmp_path, secret="s", student="bob")) < 5


def test_no_two_sheets_are_alike() -> None:
    """And each has a cache hit, a chunk, and all three requests in one step."""
    sheets = [quiz_0.make_quiz(str(number)) for number in range(60)]
    assert len({tuple(each.answer for each in sheet.questions) for sheet in sheets}) == 60
    assert all(sheet.questions[2].answer > 0 for sheet in sheets)
    assert sheets[0].describe() == quiz_0.make_quiz("0").describe()


def test_a_sheet_does_not_tell_and_a_wrong_answer_gets_a_hint(tmp_path: Path) -> None:
    quiz = quiz_0.make_quiz("ada")
    question = next(each for each in quiz.questions if each.hints)
    number = str(quiz.questions.index(question) + 1)
    [(mistake, hint), *_] = question.hints.items()
    hand_in(tmp_path, right_answers("ada") | {number: mistake})
    outcomes = outcomes_of(quiz_0.LAB, tmp_path)
    assert score(outcomes) == 4.5
    assert hint in said(outcomes)
    assert f"{question.answer}" not in said(outcomes).replace(question.text, "")


def test_what_is_no_answer_is_said(tmp_path: Path) -> None:
    answers = {"student": "ada", "1": "four", "2": True, "3": 1.5}
    outcomes = outcomes_of(quiz_0.LAB, hand_in(tmp_path, answers))
    assert score(outcomes) == 0
    assert "the answer is a whole number, not 'four'" in said(outcomes)
    assert [each.status for each in outcomes[:4]] == ["wrong"] * 3 + ["missing"]
    for text, message in [
        ("[1", "is no JSON"),
        ("[1]", "must look like"),
        ('{"student": ""}', 'says no "student"'),
        ("[" * 10**5, "is no JSON"),
        ("[" * 2**21, "is larger than"),
    ]:
        outcomes = outcomes_of(quiz_0.LAB, write(tmp_path, quiz_0.ANSWERS_FILE, text))
        assert message in said(outcomes)
    assert "has no file answers.json" in said(outcomes_of(quiz_0.LAB, tmp_path / "none"))


def test_the_sheets_of_a_class(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["course", "quiz", "ada", "--secret", "s"]) == 0
    assert capsys.readouterr().out == quiz_0.make_quiz("ada", "s").describe() + "\n"
    assert main(["course", "quiz", "ada", "bob", "--out", str(tmp_path / "sheets")]) == 0
    names = {file.name for file in (tmp_path / "sheets").iterdir()}
    assert names == {"quiz-ada.md", "ada.json", "quiz-bob.md", "bob.json"}
    assert main(["course", "quiz", "../x", "--out", str(tmp_path)]) == 1


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ('{"users": [{"email": "Ada@uni.edu", "id": 7}]}', "the same student has handed it in"),
        ('{"users": [{"email": "x@uni.edu", "id": 1}]}', "handed in by 1, x@uni.edu: is that"),
        ('{"users": []}', "The sheet of 'ada' was graded."),
        ("[1", "cannot be read: JSONDecodeError"),
    ],
)
def test_whose_sheet_was_graded(
    metadata: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hand_in(tmp_path, right_answers("ada"))
    write(tmp_path, "who.json", metadata)
    file, command = tmp_path / "results.json", ["course", "grade", str(tmp_path), "--labs", "0"]
    assert main([*command, "--metadata", str(tmp_path / "who.json"), "--json", str(file)]) == 0
    assert message in json.loads(file.read_text())["output"]
    assert message in capsys.readouterr().out


def test_an_export_without_a_secret_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["course", "export", "gradescope"]
    assert main([*command, str(tmp_path / "a.zip"), "--labs", "0"]) == 0
    assert "Without --secret" in capsys.readouterr().out
    assert main([*command, str(tmp_path / "b.zip"), "--labs", "0", "--secret", "s"]) == 0
    assert main([*command, str(tmp_path / "c.zip"), "--labs", "1"]) == 0
    assert "Without --secret" not in capsys.readouterr().out


def cells_of(file: Path, for_students: bool = False) -> list[str]:
    """The code cells of an exported notebook. for_students: as nbgrader's `generate_assignment` and
    `otter assign` leave them."""
    found = []
    for cell in json.loads(file.read_text(encoding="utf-8"))["cells"]:
        text = cell["source"]
        if for_students:
            text = re.sub(r"(?s)### BEGIN (HIDDEN TESTS|SOLUTION)\n.*?### END \1", "", text)
            text = re.sub(r"=.* # SOLUTION", "= ...", text)
            text = "" if "hidden: true" in text else text
        if cell["cell_type"] == "code":
            found.append(text)
    return found


def run_cells(cells: list[str], student: str, answers: dict[int, int]) -> float:
    """Run a notebook from top to bottom; count its hidden tests that pass. answers: what a student
    writes, behind the lecturer's own."""
    names: dict[str, Any] = {}
    passed = 0
    for cell in cells:
        code = cell.replace('"..."', f'"{student}"')
        if (answer := re.search(r"^answer_(\d+) =", code, re.MULTILINE)) and answers:
            code += f"\n{answer[0]} {answers.get(int(answer[1]))}"
        try:
            exec(code, names)
        except AssertionError:
            continue
        passed += "quiz_0.check(" in code
    return passed


@pytest.mark.parametrize("service", ["nbgrader", "otter"])
def test_the_quiz_as_a_notebook(
    service: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "source" / "quiz.ipynb"
    assert main(["course", "export", service, str(file)]) == 0
    cells = cells_of(file)
    right = {n: each.answer for n, each in enumerate(quiz_0.make_quiz("ada").questions, 1)}
    assert run_cells(cells, "ada", {}) == len(right), "the lecturer's own solutions"
    assert quiz_0.make_quiz("ada").sheet() in capsys.readouterr().out
    assert run_cells(cells, "ada", right) == len(right)
    assert run_cells(cells, "ada", {n: answer + 999 for n, answer in right.items()}) == 0
    assert run_cells(cells, "ada", {1: right[1]}) == 1
    assert run_cells(cells, "bob", right) < len(right)
    students = cells_of(file, for_students=True)
    assert all(word not in "".join(students) for word in (".answer", "questions[", "check("))
    assert students[:2] == cells[:2]
    assert main(["course", "export", service, str(file)]) == 1, "the file exists"
    for option in (["--labs", "1"], ["--secret", "s"], ["--seed", "1"]):
        assert main(["course", "export", service, str(tmp_path / "new"), *option]) == 1


def test_the_cells_are_what_each_service_asks_for(tmp_path: Path) -> None:
    nbformat = pytest.importorskip("nbformat")
    for service in ("nbgrader", "otter"):
        exports.export_notebook(tmp_path / service, service)
        nbformat.validate(nbformat.read(tmp_path / service, as_version=4))
    cells = json.loads((tmp_path / "nbgrader").read_text())["cells"]
    marks = [cell["metadata"]["nbgrader"] for cell in cells if cell["metadata"]]
    assert len({each["grade_id"] for each in marks}) == len(marks) == 21
    assert all(each["schema_version"] == 3 and not each["task"] for each in marks)
    assert sum(each.get("points", 0) for each in marks) == 5
    assert all(each["grade"] == ("points" in each) != each["solution"] for each in marks[1:])
    assert [each["grade_id"] for each in marks if each["locked"]] == [
        "sheet",
        *(f"test_{n}" for n in range(1, 11)),
    ]
    raw = [c["source"] for c in json.loads((tmp_path / "otter").read_text())["cells"]]
    assert raw[0].startswith("# ASSIGNMENT CONFIG\n")
    found = re.findall(r"^# (?:BEGIN|END) .*", "\n".join(raw), re.MULTILINE)
    of_one = ["BEGIN QUESTION", "BEGIN SOLUTION", "END SOLUTION", "BEGIN TESTS", "END TESTS"]
    assert found == [f"# {each}" for each in [*of_one, "END QUESTION"]] * 10


# -- lab 9 --

NO_TEST = "def check():\n    pass\n"


@pytest.fixture(scope="module")
def strong_tests() -> str:
    """A good answer: it finds every mutant of the bank (see the slow test)."""
    return (Path(__file__).parent / "course_bug_hunt.py").read_text(encoding="utf-8")


def hunt(folder: Path, source: str, **setting: object) -> list[Outcome]:
    write(folder, hunt_9.FILE, source)
    return outcomes_of(hunt_9.LAB, folder, **{"student": "ada", **setting})


@pytest.mark.slow
def test_good_tests_find_six_bugs(strong_tests: str, tmp_path: Path) -> None:
    outcomes = hunt(tmp_path, strong_tests)
    assert score(outcomes) == 10, said(outcomes)


@pytest.mark.slow
@pytest.mark.parametrize(
    "bug",
    sample(
        [bug for bugs in hunt_9.HUNT.get_bugs().values() for bug in bugs],
        lambda bug: bug[0].number.partition(".")[0],
        1,
    ),
    ids=lambda bug: f"{bug[1].task} {bug[1].mistake}",
)
def test_each_bug_can_be_found_through_public_names(
    bug: tuple[Task, Mutant], strong_tests: str
) -> None:
    tests = hunt_9.find_tests(strong_tests)
    assert hunt_9.try_engine(hunt_9.LAB, strong_tests, tests, bug)


@pytest.mark.slow
def test_a_bug_that_hangs_is_found_and_one_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lecturer's private bank stands beside the public one; here it is all there is."""
    own = [
        Mutant("1.4", "none", "-(-num_tokens // self.block_size)", "0"),
        Mutant("3.6", "no end", "step.budget -= num_tokens\n", "while True:\n            pass\n"),
    ]
    monkeypatch.setattr(hunt_9, "NUM_BUGS", 2)
    monkeypatch.setattr("nanoserve.extras.course.mutants.MUTANTS", [])
    monkeypatch.setattr(hunt_9.HUNT, "bank", own)
    source = hunt_9.STARTER + (
        "def test_blocks():\n    assert BlockManager(8, 4).num_blocks_for(5) == 2\n"
    )
    monkeypatch.setattr(hunt_9.LAB, "seconds", 1.0)
    outcomes = hunt(tmp_path, source)
    assert [each.status for each in outcomes] == ["right"] * 3, said(outcomes)


def test_a_bank_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a file of --bank, or in a module of --hidden."""
    monkeypatch.setattr(hunt_9.HUNT, "bank", [])
    file = tmp_path / "bank.json"
    file.write_text(json.dumps([["1.4", "none", "-(-num_tokens // self.block_size)", "0"]]))
    write(tmp_path, hunt_9.FILE, "x = 1")
    command = ["course", "grade", str(tmp_path), "--labs", "9", "--bank", str(file)]
    assert main(command) == 0
    source = (
        "from nanoserve.extras.course.mutants import Mutant\n"
        "LAB.exercise.bank.append(Mutant('1.4', 'one', '-(-num_tokens // self.block_size)', '1'))\n"
    )
    grade([hunt_9.LAB], tmp_path, hidden={9: {"lab9_bank.py": source}})
    assert [each.mistake for _, each in hunt_9.HUNT.get_bugs()["1.4"][:2]] == ["none", "one"]


def test_all_mistakes_of_a_student_are_in_different_functions() -> None:
    chosen = [hunt_9.HUNT.choose(str(number), "s") for number in range(20)]
    for bugs in chosen:
        assert len({task.number for task, _ in bugs}) == hunt_9.NUM_BUGS
        for task, mutant in bugs:
            source = (ROOT / (task.module.replace(".", "/") + ".py")).read_text()
            assert mutate(source, task.name, mutant) != source
    assert len({str(bugs) for bugs in chosen}) == 20
    assert hunt_9.HUNT.choose("1", "s") != hunt_9.HUNT.choose("1", "t")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (NO_TEST, "no function whose name begins with test"),
        ("def test_f(x): pass", "test_f of bug_hunt.py takes arguments"),
        ("def test_f(): assert False", "on the right engine test_f fails: AssertionError"),
        ("1 / 0\ndef test_f(): pass", "on the right engine test_f fails: ZeroDivisionError"),
        ("def test_f(): raise SystemExit", "on the right engine test_f fails: SystemExit"),
        ("import os\ndef test_f(): pass", "line 1 of bug_hunt.py uses os"),
        ("def test_f(): x._must_copy(1)", "uses _must_copy: use public names only"),
        ("from nanoserve.block_manager import _x\ndef test_f(): pass", "uses _x: use public names"),
        ("from nanoserve.extras.course import mutants\ndef test_f(): 1", "uses nanoserve.extras"),
        ("def test_f(:", "line 1: SyntaxError"),
        ("x = 1\ny = x" + ".real" * 600 + "\ndef test_f(): pass", "RecursionError"),
    ],
)
def test_tests_that_do_not_count(source: str, message: str, tmp_path: Path) -> None:
    outcomes = hunt(tmp_path, source)
    assert score(outcomes) == 0
    assert message in said(outcomes)


# -- lab 10 --

GOOD_POLICY = """
from nanoserve.scheduler import Scheduler

class Policy(Scheduler):
    now = 0.0

    def schedule(self):
        self.max_chunk, self.token_budget = 250, 280
        late = [s for s in self.waiting if self.now - s.metrics.queued_ts > 0.55]
        others = len(self.waiting) - len(late)
        for seq in self.waiting:
            seq.is_held = others > 0 and seq in late and not seq.num_output_tokens
        return super().schedule()
"""


def policy(body: str) -> str:
    return (
        "from nanoserve.scheduler import Scheduler\n\nclass Policy(Scheduler):\n"
        f"    def schedule(self):\n{body}\n"
    )


@pytest.mark.slow
def test_a_policy_is_graded_beside_first_come_first_served(tmp_path: Path) -> None:
    outcomes = outcomes_of(contest_10.LAB, write(tmp_path, contest_10.FILE, GOOD_POLICY))
    assert score(outcomes) == 5, said(outcomes)
    assert "requests were good in" in said(outcomes)


@pytest.mark.slow
def test_a_policy_earns_the_same_twice(tmp_path: Path) -> None:
    outcomes = outcomes_of(contest_10.LAB, write(tmp_path, contest_10.FILE, GOOD_POLICY))
    again = outcomes_of(contest_10.LAB, tmp_path)
    assert said(again) == said(outcomes), "no noise"
    same = outcomes_of(contest_10.LAB, write(tmp_path, contest_10.FILE, contest_10.STARTER))
    assert score(same) == 3, "the rules are kept, and it is no better"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("Policy = 1", "must have a class Policy(Scheduler)"),
        ("class Policy: pass", "must have a class Policy(Scheduler)"),
        ("from nanoserve.tools.fake_executor import next_token", "cannot run the model"),
        ("\n".join(f"x = {n}" for n in range(61)), "has 61 lines of code; at most 60"),
        (policy("        return 1 / 0"), "ZeroDivisionError"),
        (policy("        return 'a' * 2**40"), "MemoryError"),
        (policy("        return self.__class__.__mro__"), "uses __mro__"),
        (policy("        Scheduler.schedule = print"), "an assignment to .schedule"),
        ("raise SystemExit(0)", "SystemExit: 0"),
        (
            policy(
                "        step = super().schedule()\n"
                "        for seq in self.running:\n"
                "            seq.token_ids.append(1)\n"
                "        return step"
            ),
            "IndexError",
        ),
        (
            "from nanoserve.sequence import SchedulerOutput\n"
            + policy("        return SchedulerOutput((), (), (), 0)"),
            "nobody is scheduled any more",
        ),
    ],
)
def test_a_policy_that_breaks_a_rule(source: str, message: str, tmp_path: Path) -> None:
    outcomes = outcomes_of(contest_10.LAB, write(tmp_path, contest_10.FILE, source))
    assert score(outcomes) == 0, said(outcomes)
    assert message in said(outcomes)


def test_a_tree_without_holes_does_not_speak_of_them(tmp_path: Path) -> None:
    make.make(tmp_path / "out", load_labs([10]))
    text = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert "policy.py" in text
    assert "hole" not in text and "pytest" not in text


def test_nothing_is_no_worse_than_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a hard trace first come, first served keeps no promise either."""
    nothing = contest_10.Result(0, 120, 7.0, 120, 0, 0)
    monkeypatch.setattr(contest_10, "serve_in_order", lambda *_: nothing)
    monkeypatch.setattr(contest_10, "read_result", lambda _: nothing)
    outcomes = outcomes_of(contest_10.LAB, write(tmp_path, contest_10.FILE, contest_10.STARTER))
    assert score(outcomes) == 3, said(outcomes)


@pytest.mark.slow
def test_a_rule_that_is_broken_once_costs_that_trace(tmp_path: Path) -> None:
    """The long queue of "bursts" is where it shows."""
    source = policy("        self.token_budget = 4096\n        return super().schedule()")
    outcomes = outcomes_of(contest_10.LAB, write(tmp_path, contest_10.FILE, source))
    assert "tokens, the budget is 1024" in said(outcomes)
    assert score(outcomes) == 2, said(outcomes)


def test_the_clock_counts_what_the_step_computes() -> None:
    """One request alone: its first token after one step, each later one after one more."""
    [request, *_] = contest_10.make_trace("chat", 3)
    result = contest_10.simulate([request], Scheduler)
    num_prompt, num_output = len(request.prompt), len(request.output)
    steps = [(num_prompt, num_prompt)] + [(1, num_prompt + n) for n in range(1, num_output)]
    spent = sum(
        contest_10.STEP + contest_10.PER_TOKEN * tokens + contest_10.PER_KV * context
        for tokens, context in steps
    )
    assert result.seconds == pytest.approx(request.arrival + spent)
    assert result.num_good == 1


def test_comments_imports_and_docstrings_are_no_lines_of_code() -> None:
    source = '"""A\nB"""\nimport math\n\n# c\ndef f():\n    """D"""\n    return (\n1)\n'
    assert contest_10.count_lines(source) == 2, "def and return"


def test_a_table_and_a_plot_of_policies() -> None:
    names = [*contest_10.KINDS, *(f"mixed {rate:g}" for rate in contest_10.RATES)]
    rows = [
        contest_10.Row("<slow>", dict.fromkeys(names, 1.0)),
        contest_10.Row("fast", dict.fromkeys(names, 2.0)),
        contest_10.Row("broken", {}, "a | b"),
    ]
    lines = contest_10.leaderboard(rows).splitlines()
    assert lines[2] == "| 1 | fast | 2.00 | 2.00 | 2.00 | 6.00 |"
    assert lines[4] == "| 3 | broken | - | - | - | a   b |"
    svg = ElementTree.fromstring(contest_10.plot(rows))
    assert len(svg.findall("{http://www.w3.org/2000/svg}polyline")) == 2


@pytest.mark.slow
def test_the_leaderboard(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = {"good": GOOD_POLICY, "same": contest_10.STARTER, "broken": "x = ("}
    for name, source in folders.items():
        (tmp_path / name).mkdir()
        write(tmp_path / name, contest_10.FILE, source)
    plot = tmp_path / "goodput.svg"
    arguments = [str(tmp_path / name) for name in folders]
    assert main(["course", "contest", *arguments, "--seed", "1", "--plot", str(plot)]) == 0
    rows = capsys.readouterr().out.splitlines()[2:]
    names = [row.split("|")[2].strip() for row in rows]
    assert names == ["good", "(first come, first served)", "same", "broken"]
    assert "SyntaxError" in rows[3]
    svg = ElementTree.parse(plot).getroot()
    assert len(svg.findall("{http://www.w3.org/2000/svg}polyline")) == 3


# -- variants --

SOLUTIONS = {
    "Pool": """
class Pool(BlockPool):
    def __init__(self, num_blocks, *args, **options):
        super().__init__(num_blocks, *args, **options)
        self.uses = [0] * num_blocks

    def allocate(self):
        block = min(self.free_queue, key=lambda each: min(self.uses[each], {number}))
        self.free_queue.move_to_end(block, last=False)
        self.uses[block] = 1
        return super().allocate()

    def share(self, block_id):
        super().share(block_id)
        self.uses[block_id] += 1
""",
    "Victim": """
class Victim(Scheduler):
    def _preempt_until_fits(self, seq, num_tokens):
        while not self.block_manager.can_append(seq, num_tokens):
            behind = self.running[self.running.index(seq) + 1 :][-{number} :]
            tables = self.block_manager.block_tables
            victim = max(reversed(behind), key=lambda s: len(tables[s.seq_id]), default=seq)
            self.preempt(victim)
            if victim is seq:
                return False
        return True
""",
    "Reserve": """
class Reserve(Scheduler):
    def _num_tokens_to_admit(self, num_uncomputed, step):
        kept = {number} if self.running else 0
        most = min(num_uncomputed, self.max_chunk, max(0, step.budget - kept))
        return most if most == num_uncomputed or self.enable_chunked_prefill else 0
""",
    "Sharing": """
class Sharing(BlockManager):
    def _hashes_of(self, seq, num_blocks):
        hashes, size, salt = seq.block_hashes, self.block_size, seq.cache_salt
        parts = salt if salt is None else tuple(salt.split("/")[:{number}])
        parent = hashes[-1] if hashes else self._hash_table.get(None, parts)
        for start in range(len(hashes) * size, num_blocks * size, size):
            parent = self._hash_table.get(parent, tuple(seq.token_ids[start : start + size]))
            hashes.append(parent)
        return hashes
""",
}
MISTAKES = {
    "Pool": [
        ("min(self.uses[each], {number})", "self.uses[each]"),
        ("self.uses[block] = 1", "self.uses[block] += 1"),
        ("lambda each: min(", "lambda each: -min("),
        ("self.uses[block_id] += 1", "pass"),
    ],
    "Victim": [
        ("[-{number} :]", ""),
        ("max(reversed(behind)", "max(behind"),
        ("max(reversed(behind)", "min(reversed(behind)"),
        ("self.running[self.running.index(seq) + 1 :]", "self.running"),
    ],
    "Reserve": [
        ("{number} if self.running else 0", "{number}"),
        ("{number} if self.running else 0", "0"),
        ("max(0, step.budget - kept)", "step.budget - kept"),
        ("num_uncomputed, self.max_chunk,", "num_uncomputed,"),
        (" if most == num_uncomputed or self.enable_chunked_prefill else 0", ""),
    ],
    "Sharing": [
        ("[:{number}]", ""),
        ("tuple(salt.split('/')[:{number}])".replace("'", '"'), 'salt.split("/")[0]'),
        ("salt if salt is None else", ""),
        ("self._hash_table.get(parent, tuple(", "self._hash_table.get(None, tuple("),
    ],
}
TERMS = {  # each class is in one of them
    name: next(str(n) for n in range(99) if name in variant_15.choose(str(n)))
    for name in variant_15.CHOICES
}


def solve(term: str, old: str = "", new: str = "") -> str:
    """variant.py of a term, with one replacement."""
    text = variant_15.HEADER.format(term=term)
    for name, number in variant_15.choose(term).items():
        solution = SOLUTIONS[name]
        if old in solution:
            solution = solution.replace(old, new)
        text += solution.replace("{number}", str(number))
    return text


@pytest.mark.parametrize("term", sorted(set(TERMS.values())))
def test_the_right_classes_earn_all_points(term: str, tmp_path: Path) -> None:
    folder = write(tmp_path, variant_15.FILE, solve(term))
    outcomes = outcomes_of(variant_15.LAB, folder, term=term)
    assert score(outcomes) == 5 * variant_15.NUM_CHOSEN, said(outcomes)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mistake"),
    sample([(n, m) for n in MISTAKES for m in MISTAKES[n]], lambda each: each[0], 1),
)
def test_each_mistake_costs_points(name: str, mistake: tuple[str, str], tmp_path: Path) -> None:
    """In its class only. (A parameter of 1 makes some of them right: another term is taken.)"""
    term = next(str(n) for n in range(999) if variant_15.choose(str(n)).get(name, 0) > 1)
    old, new = mistake
    assert SOLUTIONS[name].count(old) == 1
    folder = write(tmp_path, variant_15.FILE, solve(term, old, new))
    outcomes = outcomes_of(variant_15.LAB, folder, term=term)
    assert {each.task.name for each in outcomes if each.status != "right"} == {name}, said(outcomes)


@pytest.mark.parametrize("name", ["Pool"])
def test_what_make_writes_earns_nothing(name: str, tmp_path: Path) -> None:
    files = variant_15.LAB.exercise.get_files(Setting(term=TERMS[name]))  # type: ignore[union-attr]
    write(tmp_path, variant_15.FILE, files[variant_15.FILE])
    outcomes = outcomes_of(variant_15.LAB, tmp_path, term=TERMS[name])
    assert not [each.behaviour.title for each in outcomes if each.score]
    assert "not written yet (15: " in said(outcomes)


@pytest.mark.slow
@pytest.mark.parametrize("name", list(variant_15.CHOICES))
def test_what_make_writes_earns_nothing_in_each_class(name: str, tmp_path: Path) -> None:
    test_what_make_writes_earns_nothing(name, tmp_path)


def test_terms_differ_and_each_class_is_chosen() -> None:
    chosen = [variant_15.choose(f"20{n}a") for n in range(27, 60)]
    assert len({str(each) for each in chosen}) > 20
    assert {name for each in chosen for name in each} == set(variant_15.CHOICES)
    assert variant_15.choose("2027a") == variant_15.choose("2027a")


def test_another_class_is_no_answer(tmp_path: Path) -> None:
    write(tmp_path, variant_15.FILE, "class Pool: pass\nclass Victim: pass\n")
    outcomes = outcomes_of(variant_15.LAB, tmp_path, term=TERMS["Pool"])
    assert score(outcomes) == 0
    assert "variant.py must have a class Pool(BlockPool)." in said(outcomes)


# -- the student's tree --


def test_the_tree_has_what_a_student_writes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "tree"
    labs = load_labs([0, 9, 10, 15])
    assert make.make(out, labs, "2027a") == []
    assert json.loads((out / "course.json").read_text())["variant"] == "2027a"
    for name in ("answers.json", "bug_hunt.py", "policy.py", "variant.py"):
        assert (out / name).is_file()
        assert f"- `{name}`" in (out / "README.md").read_text()
    assert "1" in json.loads((out / "answers.json").read_text()), "of lab 0"
    assert not (out / "nanoserve" / "extras" / "course" / "mutants.py").exists()
    assert main(["course", "grade", str(out), "--labs", "0", "--student", "ada"]) == 0
    assert "not answered yet" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("labs", [[0, 9, 10, 15], [0, 3, 9, 10, 15]], ids=["whole", "holes"])
def test_the_tree_looks_at_itself(labs: list[int], tmp_path: Path) -> None:
    """It has neither the answers nor the engines with mistakes, and says so."""
    out = tmp_path / "tree"
    make.make(out, load_labs(labs), "2027a")
    write(out, quiz_0.ANSWERS_FILE, quiz_0.empty_answers("ada"))
    command = [sys.executable, "-m", "nanoserve", "course"]
    grade = [*command, "grade", "--labs", "0,9,10,15"]
    done = subprocess.run(grade, cwd=out, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "0 of 10 are answered; your lecturer has the right numbers" in done.stdout
    assert "not written yet (15: " in done.stdout
    quiz = [*command, "quiz", "ada"]
    sheet = subprocess.run(quiz, cwd=out, capture_output=True, text=True, check=False)
    if 3 in labs:
        assert "not written yet (3." in done.stdout, "by the bug hunt"
        assert "no trace was served by the rules" in done.stdout, "by the contest"
        assert "Your lecturer has the sheets" in sheet.stderr
    else:
        assert "the engines with mistakes are at your lecturer's" in done.stdout
        assert sheet.stdout == quiz_0.make_quiz("ada").describe() + "\n"
