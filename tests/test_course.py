"""Every grader gives the right solution all points, a skeleton none, and a typical mistake fewer
where it was made, and nowhere else."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from nanoserve.teaching.course.__main__ import HERE, LABS, main

SOLUTIONS = Path(__file__).parent / "course_solutions"
# (lab, what the solution has, what a student wrote, the task that loses points)
MISTAKES = [
    (1, "self.uncache(block_id)", "pass", "1.1"),
    (1, "self.free_queue.pop(block_id, None)", "pass", "1.2"),
    (1, "last=self.block_hashes[block_id] is not None", "last=True", "1.3"),
    (1, "-(-num_tokens // self.block_size)", "num_tokens // self.block_size + 1", "1.4"),
    (1, "needed + len(taken)", "needed", "1.5"),
    (1, "hashes[-1] if hashes else", "", "1.6"),
    (1, "seq.extra_keys", "None", "1.6"),
    (1, "(seq.num_tokens - 1)", "seq.num_tokens", "1.7"),
    (1, "break", "continue", "1.7"),
    (1, " if self.enable_prefix_caching else 0", "", "1.7"),
    (1, "reversed(", "list(", "1.8"),
    (2, "self.max_chunk, step.budget)", "self.max_chunk)", "2.1"),
    (2, "            return 0", "            pass", "2.1"),
    (2, "self.running[-1]", "self.running[0]", "2.2"),
    (2, "step.budget - behind", "step.budget", "2.3"),
    (2, "== before", ">= 0", "2.3"),
    (2, "seq.num_tokens - num_cached", "seq.num_tokens", "2.4"),
    (2, "or not self.has_seq_slot(seq)", "", "2.4"),
    (2, "and not self.admit(seq, step)", "and self.admit(seq, step) is None", "2.5"),
    (2, "seq.metrics.queued_ts + ", "", "2.7"),
    (3, "score.masked_fill(torch.arange(k) > position, -torch.inf)", "score", "3.1"),
    (3, "torch.arange(seq_len - (end - start), seq_len)", "torch.arange(end - start)", "3.4"),
    (3, ".flatten(0, 1)[:seq_len]", ".flatten(0, 1)", "3.2"),
    (3, "mixed * factor", "mixed", "3.3"),
    (3, "safe = new_top.masked_fill(new_top.isinf(), 0)", "safe = new_top", "3.3"),
    (4, "probs < limit", "probs < min_p[:, None]", "4.1"),
    (4, "before >= top_p", "before + probs >= top_p", "4.2"),
    (4, "right=True", "right=False", "4.3"),
    (4, "for each in (seed, branch, position)", "for each in (seed + branch + position,)", "4.4"),
    (4, "batch.temperature.masked_fill(is_greedy, 1)[:, None]", "1", "4.5"),
    (5, "range(number, len(tokens))", "range(len(tokens) - 1, number - 1, -1)", "5.1"),
    (5, "end : end + most", "end : end + most + 1", "5.2"),
    (5, "sampled[: number + 1]", "sampled[:number]", "5.3"),
    (5, "rest = (p - q).clamp(min=0)", "rest = p", "5.4"),
    (6, "return y + x", "return x", "6.1"),
    (6, "set(ids.tolist()) - {-1}", "set(ids.tolist())", "6.2"),
    (6, "lora_a * adapter.scaling", "lora_a", "6.3"),
    (6, "y[:, rows] = ", "y[:, :2] = ", "6.4"),
    (7, "weight.chunk(size)[rank]", "weight[rank::size]", "7.1"),
    (7, "hidden @ row_shard", "all_reduce(hidden) @ row_shard", "7.2"),
    (7, "last // share + 1", "first // share + 1", "7.3"),
    (7, "pieces[(rank - step) % size])", "x)", "7.4"),
    (7, " + best * width", "", "7.5"),
    (8, "(1, 13)", "(1, 4)", "8.2"),
    (8, "assert computed + toy.block_manager.num_hit_tokens == 26", "", "8.3"),
    (8, "assert not any(toy.block_manager.pool.ref_counts)", "", "8.5"),
    (8, "assert count == tables.count(block)", "", "8.6"),
    (8, "assert second.num_cached_tokens == 0", "", "8.7"),
    (9, "short_first: bool = False", "short_first: bool = True", "9.1"),
]  # fmt: skip
TOGETHER = {"1.9", "2.6", "3.5", "4.6", "5.5", "6.5"}  # tasks that need those before them


def grade(folder: Path, lab: int, source: str | None, *options: str) -> list[dict]:
    """The results of a student who wrote this."""
    main(["start", str(folder), "--labs", str(lab)])
    if source is not None:
        (folder / f"{LABS[lab]}.py").write_text(source, encoding="utf-8")
    scores = folder / "scores.json"
    main(["grade", str(folder), "--labs", str(lab), f"--scores={scores}", *options])
    return json.loads(scores.read_text(encoding="utf-8"))["tests"]


QUICK = ("-k", "not engine and not contest")  # without the demo model


def solution_of(lab: int) -> str:
    return (SOLUTIONS / f"{LABS[lab]}.py").read_text(encoding="utf-8")


def check_solution(folder: Path, lab: int, *options: str) -> None:
    for result in grade(folder, lab, solution_of(lab), *options):
        assert result["score"] == result["max_score"], result


@pytest.mark.parametrize("lab", LABS)
def test_a_skeleton_is_not_written_and_its_solution_is_right(tmp_path: Path, lab: int) -> None:
    for result in grade(tmp_path / "skeleton", lab, None, *QUICK):
        assert result["score"] == 0
        assert "not written" in result["output"]
    check_solution(tmp_path / "solution", lab, *QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("lab", LABS)
def test_a_solution_carries_the_engine_and_handouts_know_the_points(
    tmp_path: Path, lab: int
) -> None:
    check_solution(tmp_path / "solution", lab)
    points: dict[str, float] = {}
    for result in grade(tmp_path / "skeleton", lab, None):
        assert "not written" in result["output"]
        task = result["name"].split()[0]
        points[task] = points.get(task, 0) + result["max_score"]
    for language in ("md", "zh-CN.md"):
        text = (HERE / "handouts" / f"lab{lab}.{language}").read_text(encoding="utf-8")
        said = re.findall(r"^\| (\d\.\d) \|.*\| (\d+) \|$", text, re.MULTILINE)
        assert {task: int(number) for task, number in said} == points


def check_mistake(folder: Path, lab: int, right: str, wrong: str, task: str) -> None:
    assert right in solution_of(lab)
    results = grade(folder, lab, solution_of(lab).replace(right, wrong), "-k", "not engine")
    lost = {each["name"].split()[0] for each in results if each["score"] < each["max_score"]}
    assert task in lost
    assert lost <= {task, *TOGETHER}


@pytest.mark.parametrize(("lab", "right", "wrong", "task"), MISTAKES[:11])
def test_a_mistake_costs_points_where_it_was_made(
    tmp_path: Path, lab: int, right: str, wrong: str, task: str
) -> None:
    check_mistake(tmp_path, lab, right, wrong, task)


@pytest.mark.slow
@pytest.mark.parametrize(("lab", "right", "wrong", "task"), MISTAKES[11:])
def test_a_mistake_in_a_later_lab(
    tmp_path: Path, lab: int, right: str, wrong: str, task: str
) -> None:
    check_mistake(tmp_path, lab, right, wrong, task)


def output_of(folder: Path, lab: int, right: str, wrong: str, task: str) -> str:
    """What the student of this mistake reads of a task."""
    assert right in solution_of(lab)
    results = grade(folder, lab, solution_of(lab).replace(right, wrong), "-k", task)
    return " ".join(each["output"] for each in results)


def test_a_draw_without_the_given_random_number_is_told_so(tmp_path: Path) -> None:
    drawn = """.double().cumsum(dim=1)
    drawn = torch.searchsorted(rest, recover[:, None] * rest[:, -1:], right=True)[:, 0]"""
    said = output_of(tmp_path, 5, drawn, "\n    drawn = torch.multinomial(rest, 1)[:, 0]", "5_4")
    assert "draw with `recover`" in said


def test_an_option_that_is_no_field_is_told_why(tmp_path: Path) -> None:
    said = output_of(tmp_path, 9, "@dataclass(frozen=True)", "", "9_1")
    assert "an annotation, and the class @dataclass(frozen=True)?" in said


@pytest.mark.slow
@pytest.mark.parametrize(("user", "task"), [("Ada", "9_3"), (None, "9_5")])
def test_a_chapter_that_drops_work_is_not_better(
    tmp_path: Path, user: str | None, task: str
) -> None:
    """Less work needs fewer steps. The users of 9.3 have names, those of 9.5 have none."""
    drops = f"""
    def schedule(self) -> Any:
        if getattr(self.config, "short_first", False):
            for seq in self.waiting:
                if seq.extra_keys == {user!r}:
                    seq.max_tokens = 1
        return super().schedule()
"""
    head = "class ShortScheduler(Scheduler):"
    source = solution_of(9).replace(head, head + drops)
    results = grade(tmp_path, 9, source, "-k", task)
    [result] = results
    assert result["score"] == 0
    assert "without it" in result["output"] or "other tokens" in result["output"]


def test_the_first_function_is_green_alone(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    first = (SOLUTIONS / "lab1_pages.py").read_text(encoding="utf-8").split("    def share")[0]
    skeleton = (HERE / "labs" / "lab1_pages.py").read_text(encoding="utf-8")
    rest = skeleton[skeleton.index("    def share") :]
    imports = (
        "from nanoserve.block_manager import BlockHash\nfrom nanoserve.sequence import Sequence\n"
    )
    grade(tmp_path, 1, imports + first + rest)
    said = capsys.readouterr().out
    assert re.search(r"^1\.1 +2 of 2$", said, re.MULTILINE)
    assert re.search(r"^1\.2 +0 of 2 +not written$", said, re.MULTILINE)


def test_a_file_that_is_there_stays_and_one_that_cannot_run_says_why(tmp_path: Path) -> None:
    results = grade(tmp_path, 1, "def broken(:\n")
    assert {each["score"] for each in results} == {0}
    assert all("SyntaxError" in each["output"] for each in results)
    assert (tmp_path / "lab1_pages.py").read_text() == "def broken(:\n"


@pytest.mark.slow
def test_a_plain_pytest_in_the_folder_and_a_lecturers_own_test(tmp_path: Path) -> None:
    main(["start", str(tmp_path / "home"), "--labs", "1"])
    (tmp_path / "home" / "lab1_pages.py").write_text(solution_of(1), encoding="utf-8")
    own = tmp_path / "test_mine.py"
    own.write_text(
        'LAB = "lab1_pages"\n\n'
        "def test_1_4_no_tokens(mine):\n"
        '    assert mine("MyManager", "num_blocks_for")(8, 4).num_blocks_for(0) == 0\n'
    )
    command = [sys.executable, "-m", "pytest", "-q"]
    said = subprocess.run(command, cwd=tmp_path / "home", capture_output=True, text=True).stdout
    assert "all  21 of 21" in said
    results = grade(tmp_path / "home", 1, None, str(own), "-k", "1_4")
    assert sum(each["score"] for each in results) == 2
