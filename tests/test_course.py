"""The course kit: the engine passes, holes earn nothing, each mistake costs points where it is."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from importlib.util import find_spec
from operator import itemgetter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

pytest.importorskip("nanoserve.extras.course.cli")
from course_sample import sample

from nanoserve.__main__ import main
from nanoserve.block_manager import BlockManager, BlockPool
from nanoserve.extras.course import child, cli, grader, graft, holes, later, make, whole
from nanoserve.extras.course.exports import export_gradescope
from nanoserve.extras.course.grader import ROOT, grade, grade_task
from nanoserve.extras.course.mutants import MUTANTS, Mutant, mutate, read_bank
from nanoserve.extras.course.screen import reach, screen, stored_attributes
from nanoserve.extras.course.spec import Lab, Task, load_labs

LABS = [lab for lab in load_labs() if lab.tasks]  # with holes; the others: ..._exercises.py
NUMBERS = ",".join(str(lab.number) for lab in LABS)
TASKS = {task.number: (lab, task) for lab in LABS for task in lab.tasks}


def lab_of(mutant: Mutant) -> str:
    return mutant.task.partition(".")[0]


def source_of(task: Task) -> str:
    return (ROOT / file_of(task)).read_text(encoding="utf-8")


def file_of(task: Task) -> Path:
    return Path(task.module.replace(".", "/") + ".py")


def submit(folder: Path, task: Task, source: str) -> Path:
    """A submission with one file."""
    file = folder / file_of(task)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(source, encoding="utf-8")
    return folder


def with_body(task: Task, body: str) -> str:
    """The engine's file with another body for the task's function."""
    source = holes.cut(source_of(task), task.name, "HERE")
    lines = source.splitlines(keepends=True)
    [number] = [i for i, line in enumerate(lines) if "NotImplementedError('HERE')" in line]
    indent = lines[number][: len(lines[number]) - len(lines[number].lstrip())]
    lines[number] = "".join(f"{indent}{line}\n" for line in body.splitlines())
    return "".join(lines)


def earned(task_number: str, folder: Path, body: str, seed: int = 1) -> tuple[float, str]:
    """(points, all messages) of a task whose function has this body."""
    lab, task = TASKS[task_number]
    outcomes = grade_task(lab, task, submit(folder, task, with_body(task, body)), seed, {})
    return sum(each.score for each in outcomes), "\n".join(each.message for each in outcomes)


# -- holes --


@pytest.mark.parametrize("number", TASKS)
def test_a_hole_keeps_signature_and_specification(number: str) -> None:
    """And says so if the engine's function has another name now."""
    _, task = TASKS[number]
    source = source_of(task)
    before = holes.find(source, task.name)
    after = holes.find(holes.cut(source, task.name, task.message), task.name)
    assert ast.unparse(after.args) == ast.unparse(before.args)
    assert ast.get_docstring(after) == ast.get_docstring(before), "a docstring is the task"
    assert ast.get_docstring(after), f"{task.name} needs a docstring: it is the specification"
    assert ast.unparse(after.body[-1]) == f"raise NotImplementedError({task.message!r})"
    assert holes.take(source, task.name).startswith("def ")


@pytest.mark.parametrize(
    ("number", "words"),
    [
        ("1.6", "if it has one"),
        ("2.5", "skip_reading_prefix_cache"),
        ("3.4", "metrics.scheduled_ts"),
        ("12.3", "the token comes from p"),
        ("12.6", "max_tokens"),
        ("12.6", "metrics"),
    ],
)
def test_what_nobody_could_guess_is_in_the_specification(number: str, words: str) -> None:
    """Points hang on it, and a student has only the docstring."""
    _, task = TASKS[number]
    assert words in (ast.get_docstring(holes.find(source_of(task), task.name)) or "")


def test_a_name_that_is_not_there_or_twice() -> None:
    with pytest.raises(LookupError, match=r"0 functions have the name A\.g"):
        holes.find("class A:\n    def f(self): ...", "A.g")
    with pytest.raises(LookupError, match="2 functions have the name f"):
        holes.find("def f(): ...\ndef f(): ...", "f")


# -- points --


def test_the_engine_earns_all_points_of_lab_1() -> None:
    report = grade(LABS[:1], None)
    assert report.score == report.most > 0, report.describe()


@pytest.mark.slow
@pytest.mark.parametrize("lab", LABS, ids=lambda lab: lab.title)
def test_the_engine_earns_all_points(lab: Lab) -> None:
    skip_without(lab.packages)
    for behaviour in [each for task in lab.tasks for each in task.behaviours]:
        assert child.run(behaviour, 1) == ("right", ""), behaviour.title


def test_a_hole_earns_nothing_and_costs_only_its_own_points(tmp_path: Path) -> None:
    task = LABS[0].find("1.2")
    source = holes.cut(source_of(task), task.name, task.message)
    report = grade(LABS[:1], submit(tmp_path, task, source))
    assert report.score == report.most - task.points
    assert "not written yet (1.2: BlockPool.share)" in report.describe()


@pytest.mark.slow
@pytest.mark.parametrize("number", TASKS)
def test_every_hole_earns_nothing(number: str, tmp_path: Path) -> None:
    """Each behaviour is decided by its task's function. In this process, which saves the start of
    one for each task; but Triton's interpreter rewrites a kernel once and for all."""
    lab, task = TASKS[number]
    skip_without(lab.packages)
    source = holes.cut(source_of(task), task.name, task.message)
    if "triton" in lab.packages:
        outcomes = grade_task(lab, task, submit(tmp_path, task, source), 1, {})
        found = [(each.status, each.message) for each in outcomes]
    else:
        with grafted(task, holes.take(source, task.name)):
            found = [child.run(each, 1) for each in task.behaviours]
    assert {status for status, _ in found} == {"missing"}, found


@contextmanager
def grafted(task: Task, source: str) -> Iterator[None]:
    """The function of the task is another one, for the time of a block of code."""
    function = graft.find_function(task)
    code = function.__code__
    graft.graft(task, source)
    try:
        yield
    finally:
        function.__code__ = code


def skip_without(packages: tuple[str, ...]) -> None:
    """Triton, for one lab, is not on every system."""
    for package in packages:
        if find_spec(package) is None:
            pytest.skip(f"needs {package}")


def check_mutant(mutant: Mutant, folder: Path) -> None:
    """It loses points in its task, with a sentence."""
    lab, task = TASKS[mutant.task]
    skip_without(lab.packages)
    submit(folder, task, mutate(source_of(task), task.name, mutant))
    wrong = [each for each in grade_task(lab, task, folder, 1, {}) if each.status != "right"]
    assert wrong, "nobody saw it"
    assert all(each.message for each in wrong)


@pytest.mark.parametrize("mutant", MUTANTS[:2], ids=lambda mutant: mutant.mistake)
def test_a_mistake_costs_points(mutant: Mutant, tmp_path: Path) -> None:
    check_mutant(mutant, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mutant", sample(MUTANTS, lab_of), ids=lambda each: f"{each.task} {each.mistake}"
)
def test_each_mistake_costs_points(mutant: Mutant, tmp_path: Path) -> None:
    check_mutant(mutant, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mutant",
    sample([each for each in MUTANTS if lab_of(each) != "14"], lab_of, 1),
    ids=lambda each: f"{each.task} {each.mistake}",
)
def test_a_mistake_costs_the_same_twice_and_no_other_tasks_points(
    mutant: Mutant, tmp_path: Path
) -> None:
    lab, task = TASKS[mutant.task]
    submit(tmp_path, task, mutate(source_of(task), task.name, mutant))
    first, again = (grade_task(lab, task, tmp_path, 1, {}) for _ in range(2))
    assert [each.score for each in first] == [each.score for each in again]
    others = [other for other in lab.tasks if other is not task and other.module == task.module]
    for other in others[:1]:
        outcomes = grade_task(lab, other, tmp_path, 1, {})
        assert all(each.status == "right" for each in outcomes), "it cost another task's points"


def test_a_bank_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "bank.json"
    file.write_text(json.dumps([["1.4", "one more", "num_tokens", "1 + num_tokens"]]))
    [mutant] = read_bank(file)
    with pytest.raises(ValueError, match=r"stands 3 times in BlockManager\.num"):
        mutate(source_of(TASKS["1.4"][1]), "BlockManager.num_blocks_for", mutant)
    file.write_text("[1")
    with pytest.raises(ValueError, match="is no bank of mutants"):
        read_bank(file)


@pytest.mark.slow
def test_hidden_behaviours_count(tmp_path: Path) -> None:
    """A lecturer's file registers one more; it is given to the child as text."""
    (tmp_path / "lab1_even.py").write_text(
        "from nanoserve.block_manager import BlockManager\n"
        "from nanoserve.extras.course.spec import must\n"
        "@LAB.find('1.4').behaviour(7, 'large numbers')\n"
        "def large_numbers():\n"
        "    must(BlockManager(1, 16).num_blocks_for(10**9) == 62_500_000, 'a billion tokens')\n"
    )
    code = f"""
from pathlib import Path
from nanoserve.extras.course.cli import read_hidden
from nanoserve.extras.course.grader import grade
from nanoserve.extras.course.spec import load_labs
report = grade(load_labs([1]), None, hidden=read_hidden(Path({str(tmp_path)!r})))
print([each.status for each in report.outcomes if each.behaviour.points == 7])
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["['right']"]


# -- a student's tree: later labs are not written yet --


@pytest.mark.parametrize("lab", LABS[:2], ids=lambda lab: lab.title)
def test_holes_of_later_labs_block_no_check(lab: Lab) -> None:
    """All but a few behaviours, which say what they wait for."""
    others = [task for other, task in TASKS.values() if lab.number < other.number < 14]
    with ExitStack() as stack:
        for task in others:
            source = holes.cut(source_of(task), task.name, task.message)
            stack.enter_context(grafted(task, holes.take(source, task.name)))
        stack.enter_context(later.filled(lab.number))
        behaviours = [each for task in lab.tasks for each in task.behaviours]
        found = [child.run(each, 1) for each in behaviours]
    waiting = [message for status, message in found if status == "waiting"]
    assert {status for status, _ in found} <= {"right", "waiting"}, [
        (each.title, message)
        for each, (status, message) in zip(behaviours, found, strict=True)
        if status not in ("right", "waiting")
    ]
    assert len(waiting) <= 2, waiting


@pytest.mark.slow
@pytest.mark.parametrize(
    "lab", [lab for lab in LABS[2:] if not lab.packages], ids=lambda lab: lab.title
)
def test_holes_of_later_labs_block_no_check_of_a_later_lab(lab: Lab) -> None:
    test_holes_of_later_labs_block_no_check(lab)


@pytest.mark.parametrize("number", later.BODIES)
def test_what_fills_a_later_hole_is_no_solution(number: str) -> None:
    _, task = TASKS[number]
    code = graft.find_function(task).__code__
    with grafted(
        task,
        f"def {code.co_name}({', '.join(code.co_varnames[: code.co_argcount])}):\n"
        f"    {later.BODIES[number]}\n",
    ):
        found = [child.run(each, 1)[0] for each in task.behaviours]
    assert set(found) != {"right"}


# -- submissions that are not what they should be --

ENDLESS = "while True:\n    pass"
HOSTILE = {
    "reads files": "return open('/etc/passwd').read()",
    "imports os": "import os\nreturn os.getpid()",
    "imports what imports os": "from nanoserve import extras",
    "walks to the interpreter": "return ().__class__.__mro__[1].__subclasses__()",
    "patches the checks": "from nanoserve.extras.course import spec\nspec.must = print",
    "patches what audits": "self.check = print",
    "a format that walks": "return '{0.__class__}'.format(self)",
    "gets by name": "return getattr(self, 'po' + 'ol')",
    "runs text": "eval('1')",
    "writes a global": "global BlockPool\nBlockPool = None",
    "calls torch tl": "import torch as tl\ntl.load('file')",
    "gets by a dotted name": "import operator\nreturn operator.attrgetter('pool')(self)",
    "runs an annotation": "import typing\ntyping.get_type_hints(self)",
    "takes all names": "from nanoserve.config import *",
    "equals everything": "class A(int):\n    def __eq__(self, o): return True\nreturn A()",
    "a module of a module": "import dataclasses\ndataclasses.re.enum.bltns.id(1)",
    "a private function": "import dataclasses\ndataclasses._create_fn('f', (), ['1'])",
    "a private import": "from dataclasses import _create_fn\n_create_fn('f', (), ['1'])",
    "what the engine imports": "from nanoserve.config import Path\nreturn Path('/').iterdir()",
    "through the engine's module": "from nanoserve import config\nconfig.Path('/').iterdir()",
    "two meanings": "import dataclasses as m\nm.types\nimport math as m",
    "a lesser module": "from numpy.lib.stride_tricks import as_strided",
    "catches everything": "try:\n    return 1\nexcept:\n    return 2",
}


@pytest.mark.parametrize("body", HOSTILE.values(), ids=HOSTILE)
def test_what_reaches_out_is_not_run(body: str, tmp_path: Path) -> None:
    points, message = earned("1.4", tmp_path, body)
    assert points == 0
    assert "which no task needs. It was not run." in message


@pytest.mark.parametrize(
    ("number", "body", "message"),
    [
        ("8.1", "return pickle.loads(b'')", "uses pickle.loads"),  # a global of that module
        ("8.1", "def f(pickle): pass\nreturn pickle.loads(b'')", "uses pickle.loads"),
        (
            "8.1",
            "pickle = 1\nclass A:\n    y = pickle\n    pickle = 2\nA.y.loads(b'')",
            "uses pickle",
        ),
        ("8.1", "p = pickle\nreturn p.loads(b'')", "uses pickle"),
        ("1.4", "class A:\n    import math\nreturn 1", "imports in the body of a class"),
        ("1.4", "import math\nm = math\nreturn 1", "passes on the module math"),
    ],
)
def test_a_module_is_followed(number: str, body: str, message: str) -> None:
    _, task = TASKS[number]
    source = holes.take(with_body(task, body), task.name)
    assert message in str(reach(source, graft.find_function(task).__globals__))


NOTHING = ["return None", "return 0", "return []", "return True"]
SWEPT = [number for number, (lab, _) in TASKS.items() if lab.number in (1, 2, 3, 4, 5, 11, 12)]


def check_nothing(number: str, body: str, folder: Path) -> None:
    points = TASKS[number][1].points
    score, messages = earned(number, folder, body)
    assert score <= points / 5, f"{body} earns {score} of {points}\n{messages}"


@pytest.mark.parametrize("body", NOTHING[::2])
def test_a_function_that_does_nothing_earns_little(body: str, tmp_path: Path) -> None:
    check_nothing("2.3", body, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "body"), sample([(n, body) for n in SWEPT for body in NOTHING], itemgetter(0), 1)
)
def test_each_function_that_does_nothing_earns_little(
    number: str, body: str, tmp_path: Path
) -> None:
    check_nothing(number, body, tmp_path)


def test_other_ways_to_write_it_are_right(tmp_path: Path) -> None:
    for body in [
        "from math import ceil\nreturn ceil(num_tokens / self.block_size)",
        "q, r = divmod(num_tokens, self.block_size)\nreturn q + (r > 0)",
        "import math as m\ndef up(x): return m.ceil(x)\nreturn up(num_tokens / self.block_size)",
    ]:
        assert earned("1.4", tmp_path, body)[0] == 1
    lines = ["import torch.nn.functional as F", "p = F.softmax(logits, dim=-1)"]
    lines += ["keep = p >= p.amax(dim=-1, keepdim=True) * min_p[:, None]"]
    lines += ["return torch.where(keep, logits, -torch.inf)"]
    _, task = TASKS["5.2"]
    source = holes.take(with_body(task, "\n".join(lines)), task.name)
    assert screen(source, set()) is None
    assert reach(source, graft.find_function(task).__globals__) is None


def test_a_link_to_the_solution_is_not_followed(tmp_path: Path) -> None:
    lab, task = TASKS["1.4"]
    file = tmp_path / file_of(task)
    file.parent.mkdir(parents=True)
    try:
        file.symlink_to(ROOT / file_of(task))
    except OSError:
        pytest.skip("no links here")
    outcomes = grade_task(lab, task, tmp_path, 1, {})
    assert "is a link that leads out of your submission" in outcomes[0].message


def test_a_tree_in_one_outer_folder_is_found(tmp_path: Path) -> None:
    """Behind a link it is not."""
    task = TASKS["1.1"][1]
    upload = tmp_path / "upload"
    tree = submit(upload / "tree", task, source_of(task))
    (upload / "__MACOSX").mkdir()
    (upload / ".DS_Store").touch()
    assert grader.find_tree(upload) == tree == grader.find_tree(tree)
    assert grader.find_tree(tmp_path / "none") == tmp_path / "none"
    (upload / "answers.json").touch()
    assert grader.find_tree(upload) == upload
    link = tmp_path / "link"
    link.mkdir()
    (link / "tree").symlink_to(ROOT, target_is_directory=True)
    assert grader.find_tree(link) == link


def test_a_message_that_no_file_can_hold(tmp_path: Path) -> None:
    """A lone surrogate would end `print`, and a zero byte makes no XML."""
    lab, task = TASKS["1.4"]
    body = r"raise ValueError('\ud800\x00 here')"
    folder = submit(tmp_path, task, with_body(task, body))
    report = grader.Report(grade_task(lab, task, folder, 1, {}))
    assert "ValueError: ?? here" in report.describe()
    ElementTree.fromstring(report.to_junit().encode())


def test_a_students_own_check_refuses_what_the_lecturers_does(tmp_path: Path) -> None:
    out = tmp_path / "tree"
    make.make(out, [TASKS["1.4"][0]])
    file = out / file_of(TASKS["1.4"][1])
    hole = "raise NotImplementedError('1.4: BlockManager.num_blocks_for')"
    text = file.read_text(encoding="utf-8")
    file.write_text(text.replace(hole, "return type(1)(1)"), encoding="utf-8")
    command = [sys.executable, "-m", "nanoserve", "course", "grade", "--labs", "1"]
    done = subprocess.run(command, cwd=out, capture_output=True, text=True, check=True)
    assert "uses type, which no task needs" in done.stdout


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("raise SystemExit(0)", "SystemExit: 0"),
        ("raise KeyboardInterrupt", "it was stopped: the process"),
        ("return 'a' * 2**40", "MemoryError"),
        ("return self.num_blocks_for(num_tokens)", "RecursionError"),
        ("return helper(num_tokens)", "Only this function is taken from your file"),
        ("print('here'); return 0", "It printed:\nhere"),
    ],
)
def test_what_goes_wrong_is_said(body: str, message: str, tmp_path: Path) -> None:
    points, said = earned("1.4", tmp_path, body)
    assert points == 0
    assert message in said


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no limit of CPU time")
def test_an_endless_loop_is_stopped(tmp_path: Path) -> None:
    """And named as what it is; the task's next behaviours are tried, too."""
    lab, task = TASKS["1.4"]
    folder = submit(tmp_path, task, with_body(task, ENDLESS))
    outcomes = grade_task(replace(lab, seconds=1), task, folder, 1, {})
    assert [each.status for each in outcomes] == ["killed"] * len(task.behaviours)
    assert "it took too much CPU time" in outcomes[0].message


def test_files_that_are_no_python_are_named(tmp_path: Path) -> None:
    lab, task = TASKS["1.4"]
    for source, message in [
        ("def f(:", "line 1: SyntaxError"),
        ("x = 1", "LookupError: 0 functions have the name BlockManager.num_blocks_for"),
        ("\0", "SyntaxError: source code string cannot contain null bytes"),
    ]:
        outcomes = grade_task(lab, task, submit(tmp_path, task, source), 1, {})
        assert {each.status for each in outcomes} == {"refused"}
        assert message.split(":")[0] in outcomes[0].message
    outcomes = grade_task(lab, task, tmp_path / "nothing", 1, {})
    assert "your submission has no file nanoserve/block_manager.py" in outcomes[0].message


def test_parameters_stay_as_they_are(tmp_path: Path) -> None:
    lab, task = TASKS["1.4"]
    source = source_of(task).replace(
        "def num_blocks_for(self, num_tokens", "def num_blocks_for(self, n"
    )
    outcomes = grade_task(lab, task, submit(tmp_path, task, source), 1, {})
    assert "has the parameters (self, num_tokens), not ['self', 'n']" in outcomes[0].message


@pytest.mark.parametrize("number", TASKS)
def test_the_screen_lets_the_engines_own_functions_pass(number: str) -> None:
    _, task = TASKS[number]
    source = source_of(task)
    assert screen(holes.take(source, task.name), stored_attributes(source)) is None
    names = graft.find_function(task).__globals__
    assert reach(holes.take(source, task.name), names) is None


# -- the student's tree --


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("course") / "tree"
    assert main(["course", "make", str(out), "--labs", NUMBERS]) == 0
    return out


def test_no_solution_is_in_the_tree(tree: Path) -> None:
    """No history, no caches, no wheels, and no second copy of a body."""
    names = {path.name for path in tree.rglob("*")}
    assert not names & {".git", "__pycache__", "sabotage.py", "mutants.py"}
    assert not [name for name in names if name.endswith((".pyc", ".whl", ".ipynb"))]
    tasks = [task for _, task in TASKS.values()]
    bodies = {task.name: make.body_of(ROOT / file_of(task), task.name) for task in tasks}
    assert not make.find_leaks(tree, bodies)
    for task in tasks:
        source = (tree / file_of(task)).read_text(encoding="utf-8")
        assert f"raise NotImplementedError({task.message!r})" in source
    leaked = tree / "nanoserve" / "notes.md"
    leaked.write_text(holes.take(source_of(TASKS["1.3"][1]), "BlockPool.free"))
    try:
        text = leaked.read_text()
        body = [line.strip() for line in text.splitlines() if line.strip()][-5:]
        assert make.find_leaks(tree, {"BlockPool.free": body}) == [
            ("BlockPool.free", Path("nanoserve/notes.md"))
        ]
        leaked.write_text("".join(f"    {line}   --->   a remark\n" for line in body))
        assert make.find_leaks(tree, {"BlockPool.free": body}), "between other words"
    finally:
        leaked.unlink()


def test_the_tree_grades_itself(tree: Path, tmp_path: Path) -> None:
    """With the results in both forms."""
    files = [str(tmp_path / name) for name in ("results.json", "junit.xml")]
    command = [sys.executable, "-m", "nanoserve", "course", "grade", "--labs", "1"]
    command += ["--json", files[0], "--junitxml", files[1]]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "0 of 15 points" in done.stdout
    results = json.loads(Path(files[0]).read_text())
    assert results["score"] == 0
    assert sum(each["max_score"] for each in results["tests"]) == 15
    suite = ElementTree.parse(files[1]).getroot()
    assert suite.attrib["tests"] == suite.attrib["failures"] == str(len(results["tests"]))


def test_a_folder_that_is_not_empty_is_left_alone(tree: Path) -> None:
    with pytest.raises(ValueError, match="exists and is not empty"):
        make.make(tree, LABS)


# -- a whole engine --


def test_the_engine_answers_every_load() -> None:
    for load in whole.LOADS:
        text = json.dumps(whole.answer(load, 5))
        assert whole.compare(load, 5, text) == ("right", "")
        assert whole.compare(load, 6, text)[0] == "wrong", "another seed, other answers"


@pytest.mark.slow
def test_a_whole_engine_is_graded(tree: Path) -> None:
    report = grader.grade_whole(LABS, ROOT, seed=3)
    assert report.score == report.most == len(whole.get_titles()), report.describe()
    report = grader.grade_whole(LABS, tree, seed=3)
    assert report.score == 0
    assert "not written yet (" in report.describe()


def test_what_a_whole_engine_prints_on_the_way_does_not_count() -> None:
    text = "found it!\n" + json.dumps(whole.answer("one", 5))
    assert whole.compare("one", 5, text) == ("right", "")
    assert whole.compare("one", 5, "found it!") == ("wrong", "your engine printed no answers")


def test_a_whole_engine_that_fails_names_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockManager, "block_tables", property(lambda self: {}), raising=False)
    with pytest.raises(AttributeError) as caught:
        whole.answer("one", 5)
    said = whole.describe(caught.value)
    assert "of nanoserve/block_manager.py: self.block_tables" in said
    assert whole.compare("one", 5, json.dumps({"error": said})) == ("wrong", said)


@pytest.mark.slow
def test_a_wrong_block_is_a_wrong_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block that is overwritten can still be found."""
    monkeypatch.setattr(BlockPool, "uncache", lambda self, block_id: None)
    status, message = whole.compare_texts(1, whole.answer_questions(1))
    assert status == "wrong"
    assert "the model says" in message, message


# -- the commands --


def test_each_lab_counts_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["course", "make", str(tmp_path / "out"), "--labs", "1,1"]) == 0
    assert "6 holes in 1 file;" in capsys.readouterr().out


def test_a_tree_is_graded_on_the_labs_that_it_was_made_for(tmp_path: Path) -> None:
    for text, labs in [
        ('{"labs": [3, 1, 1, 15]}', [1, 3]),
        ('{"labs": 3}', None),
        ('{"labs": ["a"]}', None),
        ("[1]", None),
        ("{", None),
    ]:
        (tmp_path / "course.json").write_text(text, encoding="utf-8")
        assert cli.labs_of(tmp_path, "") == labs, text
    assert cli.labs_of(tmp_path / "missing", "") is None


def test_in_a_tree_what_it_does_not_have_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(make, "read_course", lambda *_: {"labs": [1, 2]})
    assert main(["course", "grade", "--labs", "1,5"]) == 1
    assert "lab 5 is not in this tree; it has [1, 2]" in capsys.readouterr().err
    assert main(["course", "make", str(tmp_path / "out")]) == 1
    assert "this is a student's tree" in capsys.readouterr().err
    monkeypatch.setattr(whole, "get_titles", lambda: {"one": "one request after the other"})
    assert main(["course", "grade", "--whole"]) == 0
    assert "1 of 1 points" in capsys.readouterr().out


def test_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["course", "list"]) == 0
    assert "lab 1  Pages   15 points" in capsys.readouterr().out
    assert main(["course", "check"]) == 0
    assert "a child that grades: ok" in capsys.readouterr().out
    for arguments, message in [
        (["grade"], "name the submission"),
        (["grade", str(tmp_path)], "holds no folder nanoserve/"),
        (["make", str(tmp_path / "out"), "--labs", "99"], "there is no lab 99"),
        (["grade", str(ROOT), "--hidden", str(tmp_path)], "holds no file such as lab1_pool.py"),
    ]:
        assert main(["course", *arguments]) == 1
        assert message in capsys.readouterr().err


# -- a grading service --


PYTHON = """#!/bin/sh
# Instead of the system's python3: a venv whose pip only notes what it was asked for.
case "$1 $2" in
  "-m venv")
    mkdir -p "$3/bin"
    printf '#!/bin/sh\\nexec {python} "$@"\\n' > "$3/bin/python"
    printf '#!/bin/sh\\necho "$@" > %s/pip.txt\\n' "$3" > "$3/bin/pip"
    chmod +x "$3/bin/python" "$3/bin/pip";;
  *) exec "{python}" "$@";;
esac
"""


class Service:
    """What Gradescope does with a zip: unpack it, run setup.sh once, and the script for each
    submission, in an environment of its own."""

    def __init__(self, file: Path, base: Path) -> None:
        self.base = base
        with zipfile.ZipFile(file) as archive:
            archive.extractall(base / "source")
        tools = base / "tools"
        tools.mkdir()
        (tools / "python3").write_text(PYTHON.format(python=sys.executable))
        (tools / "python3").chmod(0o755)
        path = os.pathsep.join([str(tools), os.environ["PATH"]])
        self.environment = {"AUTOGRADER": str(base), "PATH": path}
        self.bash("setup.sh")
        assert f"-r {base}/source/requirements.txt" in (base / "venv" / "pip.txt").read_text()

    def bash(self, script: str) -> None:
        command = ["bash", str(self.base / "source" / script)]
        done = subprocess.run(
            command, env=self.environment, cwd="/", capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr

    def grade(self, fill: Callable[[Path], object]) -> dict[str, Any]:
        """results.json of a submission, which `fill` writes into its folder."""
        for name in ("submission", "results"):
            shutil.rmtree(self.base / name, ignore_errors=True)
        (self.base / "submission").mkdir()
        fill(self.base / "submission")
        self.bash("run_autograder")
        return json.loads((self.base / "results" / "results.json").read_text())


@pytest.mark.skipif(sys.platform == "win32", reason="the scripts are for bash")
@pytest.mark.slow
def test_gradescope_runs_it(tmp_path: Path) -> None:
    """Nothing at all, a right and an empty function; with a check of the lecturer's own."""
    hidden = tmp_path / "private"
    hidden.mkdir()
    (hidden / "lab1_more.py").write_text(
        "@LAB.find('1.4').behaviour(5, 'a private check')\ndef a_private_check():\n"
        "    from nanoserve.block_manager import BlockManager\n"
        "    assert BlockManager(1, 16).num_blocks_for(17) == 2\n"
    )
    file = tmp_path / "autograder.zip"
    command = ["course", "export", "gradescope", str(file), "--labs", "1", "--hidden", str(hidden)]
    assert main(command) == 0
    service = Service(file, tmp_path / "autograder")
    assert "Upload the folder nanoserve/" in service.grade(lambda folder: None)["output"]
    task = TASKS["1.4"][1]
    results = service.grade(lambda folder: submit(folder, task, source_of(task)))
    assert results["score"] == sum(each["max_score"] for each in results["tests"]) == 20
    source = holes.cut(source_of(task), task.name, task.message)
    assert service.grade(lambda folder: submit(folder, task, source))["score"] == 14
    with pytest.raises(ValueError, match="exists"):
        export_gradescope(file, LABS, {})


@pytest.mark.skipif(sys.platform == "win32", reason="the scripts are for bash")
@pytest.mark.slow
def test_gradescope_is_told_variant_secret_and_seed(tmp_path: Path) -> None:
    """The quiz of a student is that of the secret, and the variant that of the term."""
    from nanoserve.extras.course.labs import quiz_0, variant_15

    file = tmp_path / "autograder.zip"
    command = ["course", "export", "gradescope", str(file), "--labs", "0", "--secret", "a b'c"]
    assert main([*command, "--variant", "2027a", "--seed", "7"]) == 0
    service = Service(file, tmp_path / "autograder")
    questions = quiz_0.make_quiz("ada", "a b'c").questions
    answers = {"student": "ada"} | {str(n): each.answer for n, each in enumerate(questions, 1)}
    (service.base / "submission_metadata.json").write_text(
        json.dumps({"users": [{"email": "bob@uni.edu", "id": 7}]})
    )

    def fill(folder: Path) -> None:
        (folder / "outer").mkdir()
        (folder / "outer" / quiz_0.ANSWERS_FILE).write_text(json.dumps(answers))

    results = service.grade(fill)
    assert "sheet of 'ada' was graded. It was handed in by 7, bob@uni.edu" in results["output"]
    assert results["score"] == 5
    names = {each["name"].partition(":")[0] for each in results["tests"]}
    assert names > set(variant_15.choose("2027a"))
    assert "--seed 7" in (service.base / "source" / "run_autograder").read_text()
    assert (
        "Upload variant.py and answers.json"
        in (service.base / "source" / "run_autograder").read_text()
    )
