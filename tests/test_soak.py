"""The soak: it finds planted bugs, and without them a short run finds nothing.

A sabotaged class takes the place of the class under test. Each part must find its sabotage within
a few rounds.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nanoserve import LLM
from nanoserve.block_manager import BlockManager
from nanoserve.scheduler import Scheduler
from nanoserve.sequence import ModelOutput, SchedulerOutput, Sequence
from nanoserve.tools.fake_executor import FakeOutput
from nanoserve.tools.soak import cli
from nanoserve.tools.soak.cli import PARTS, Part, main, soak
from nanoserve.tools.soak.control import HAS_TIERS, ControlPart, FaultyExecutor
from nanoserve.tools.soak.engine import EnginePart
from nanoserve.tools.soak.inputs import InputPart
from nanoserve.tools.soak.rounds import Round
from nanoserve.tools.soak.signals import SignalPart
from nanoserve.tools.soak.worker import TimeIsOver, Worker, WorkerFailed

SEED = 3


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Planted faults are logged as errors."""
    monkeypatch.setenv("NANOSERVE_LOGGING_LEVEL", "CRITICAL")  # for the workers
    logger = logging.getLogger("nanoserve")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(level)


def play(part: Callable[[Round], None], name: str, numbers: range) -> list[str]:
    """What a part finds in these rounds."""
    rounds = [Round(name, SEED, number).run(part) for number in numbers]
    assert all(each.num_requests or each.findings for each in rounds)
    return [what for each in rounds for what in each.findings]


# -- sabotaged classes --


class LeakyBlockManager(BlockManager):
    """Forgets a block of every third sequence that it frees."""

    num_freed = 0

    def free(self, seq: Sequence) -> None:
        self.num_freed += 1
        if self.num_freed % 3 == 0 and len(self.block_tables.get(seq.seq_id, ())) > 1:
            self.block_tables[seq.seq_id].pop()
        super().free(seq)


class ForgetfulScheduler(Scheduler):
    """Loses a waiting sequence when many wait."""

    def schedule(self) -> SchedulerOutput:
        if len(self.waiting) > 3:
            self.waiting.pop()
        return super().schedule()


class SwappingExecutor(FaultyExecutor):
    """Gives two rows each other's token."""

    def read(self, pending: FakeOutput, output: ModelOutput) -> ModelOutput:
        output = super().read(pending, output)
        tokens = output.sampled_token_ids
        if len(tokens) == 4:
            first, second = list(tokens)[:2]
            tokens[first], tokens[second] = tokens[second], tokens[first]
        return output


class LosingExecutor(FaultyExecutor):
    """Loses the token of a row."""

    def read(self, pending: FakeOutput, output: ModelOutput) -> ModelOutput:
        output = super().read(pending, output)
        if len(output.sampled_token_ids) == 3:
            output.sampled_token_ids.popitem()
        return output


class MixingExecutor(FaultyExecutor):
    """Loads two rows of the CPU tier into each other's blocks."""

    def launch(self, scheduler_output: SchedulerOutput) -> FakeOutput:
        metadata = scheduler_output.kv_connector_metadata
        if metadata is not None and len(metadata.loads) > 1:
            rows, blocks = zip(*metadata.loads, strict=True)
            loads = tuple(zip(rows[::-1], blocks, strict=True))
            metadata = metadata._replace(loads=loads)
            scheduler_output = replace(scheduler_output, kv_connector_metadata=metadata)
        return super().launch(scheduler_output)


class BlamingExecutor(FaultyExecutor):
    """Forgets to fail: a guilty request is served."""

    def _faults(self, scheduler_output: SchedulerOutput) -> list[tuple[str, int]]:
        return []


CONTROL_SABOTAGE: dict[str, dict[str, Any]] = {
    "a leaked block": {"block_manager_cls": LeakyBlockManager},
    "a lost sequence": {"scheduler_cls": ForgetfulScheduler},
    "swapped tokens": {"executor_cls": SwappingExecutor},
    "a lost token": {"executor_cls": LosingExecutor},
    "mixed rows": {"executor_cls": MixingExecutor},
    "a guilty request that is served": {"executor_cls": BlamingExecutor},
}


@pytest.mark.parametrize("name", CONTROL_SABOTAGE)
def test_the_control_part_finds(name: str) -> None:
    if name == "mixed rows" and not HAS_TIERS:
        pytest.skip("the chapter was deleted")
    part = ControlPart(**CONTROL_SABOTAGE[name])
    assert any(play(part, "control", range(k, k + 1)) for k in range(40))


class MeddlingLLM(LLM):
    """Answers with another token now and then, as if a neighbour's row had been read."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        works = self.engine.scheduler.update_from_output

        def update(step: SchedulerOutput, output: ModelOutput) -> Any:
            for seq_id, tokens in output.sampled_token_ids.items():
                if seq_id % 3 == 1:
                    output.sampled_token_ids[seq_id] = tuple(token ^ 4 for token in tokens)
            return works(step, output)

        self.engine.scheduler.update_from_output = update  # type: ignore[method-assign]


class StubbornLLM(LLM):
    """Takes Ctrl-C for an error of its own, and answers nothing."""

    def generate(self, *args: Any, **options: Any) -> Any:
        try:
            return super().generate(*args, **options)
        except KeyboardInterrupt:
            return super().generate(*args, **options)


class TouchyLLM(LLM):
    """Loses its books over a bad input."""

    def chat(self, *args: Any, **options: Any) -> Any:
        try:
            return super().chat(*args, **options)
        except Exception:
            self.engine.block_manager.pool.free_queue.popitem(last=False)
            raise


@pytest.mark.slow
def test_the_engine_part_finds_a_wrong_token() -> None:
    part = EnginePart(llm_cls=MeddlingLLM)
    assert any(play(part, "engine", range(k, k + 1)) for k in range(4))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="needs setitimer")
def test_the_signal_part_finds_a_lost_interrupt() -> None:
    part = SignalPart(llm_cls=StubbornLLM)
    assert any("no KeyboardInterrupt" in what for what in play(part, "signals", range(4)))


# -- without sabotage --


def test_a_short_run_of_the_control_plane() -> None:
    assert play(ControlPart(), "control", range(6)) == []


# About one Ctrl-C in 300 does not arrive: not understood yet. (Python drops what is raised while a
# generator is finalized.)
@pytest.mark.slow
@pytest.mark.parametrize("name", PARTS)
def test_a_run_of_each_part_finds_nothing(name: str) -> None:
    report = soak(10, SEED, [name])
    assert report.rounds[name] > 0
    assert report.findings == [], report


def test_a_round_is_the_same_again() -> None:
    """Part, seed and number decide everything."""
    drawn = [Round("engine", 5, 7).rng.random() for _ in range(2)]
    assert drawn[0] == drawn[1]
    others = {Round(*each).rng.random() for each in (("engine", 5, 8), ("control", 5, 7))}
    assert drawn[0] not in others


# -- the process, and the command --


def misbehave(how: str) -> str:
    """What a worker of the tests does."""
    match how:
        case "hang":
            time.sleep(60)
        case "memory":
            filled = bytearray(os.urandom(1000)) * 400_000
            time.sleep(60 + len(filled))
        case "crash":
            os.abort()
        case "error":
            raise ZeroDivisionError(how)
    return how


def make_target() -> Callable[[str], str]:
    return misbehave


def test_a_worker_that_hangs_or_fails() -> None:
    """It is ended, and the log says where it was; the next call has a process again."""
    worker = Worker(make_target)
    try:
        with pytest.raises(WorkerFailed, match="hang: longer than") as caught:
            worker.call("hang", seconds=0.3)
        assert "in misbehave" in caught.value.log
        with pytest.raises(TimeIsOver):
            worker.call("hang", seconds=60, until=time.monotonic())
        assert worker.call("fine", seconds=30) == "fine"
        with pytest.raises(WorkerFailed, match="ZeroDivisionError"):
            worker.call("error", seconds=30)
    finally:
        worker.close()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_a_worker_that_crashes_or_eats_memory() -> None:
    worker = Worker(make_target)
    try:
        for how in ("crash", "memory"):
            with pytest.raises(WorkerFailed) as caught:
                worker.call(how, seconds=30, megabytes=300)
            assert caught.value.kind == how
    finally:
        worker.close()


class BrokenPart:
    """Finds something in each round with an even number; ends its process in round 3."""

    def __call__(self, round: Round) -> None:
        round.num_requests = 2
        round.expect(round.number % 2, "even", round.number)
        if round.number == 3:
            os.abort()


def test_the_command_goes_on_after_a_finding(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """It prints the seed and the command that repeats the round, and exits with 1."""
    monkeypatch.setitem(PARTS, "control", Part(BrokenPart, share=1, limit=30))
    file = tmp_path / "report.json"
    arguments = ["--only", "control", "--seed", "8", "--json", str(file)]
    assert main([*arguments, "--round", "2"]) == 1
    text = capsys.readouterr().out
    command = "python -m nanoserve.tools.soak --only control --seed 8 --round 2"
    assert "even: 2" in text
    assert command in text
    [found] = json.loads(file.read_text())["findings"]
    assert (found["part"], found["seed"], found["round"]) == ("control", 8, 2)
    report = soak(float("inf"), 8, ["control"], tell=stop_after(6))
    assert [(each.round, each.what[:4]) for each in report.findings] == [
        (0, "even"),
        (2, "even"),
        (3, "cras"),
        (4, "even"),
    ]
    assert report.rounds == {"control": 6}
    assert "5 findings" not in str(report)
    assert "4 findings" in str(report)


def stop_after(number: int) -> Callable[..., None]:
    """Ends the search, as the time does."""

    def tell(report: cli.Report, found: list[cli.Finding]) -> None:
        if sum(report.rounds.values()) == number:
            report.seconds = float("inf")

    return tell


def test_a_round_is_dropped_when_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """GRACE seconds later it is not waited for, and no finding: its own limit is not reached."""
    ends: list[float] = []

    def call(worker: Worker, round: Round, until: float, **options: Any) -> Round:
        ends.append(until)
        if round.number == 2:
            raise TimeIsOver
        return round

    monkeypatch.setattr(Worker, "call", call)
    before = time.monotonic()
    report = soak(1000, SEED, ["control"])
    assert before + 1000 + cli.GRACE <= ends[0] <= time.monotonic() + 1000 + cli.GRACE
    assert ends == ends[:1] * 3
    assert report.rounds == {"control": 2}
    assert report.findings == []
    assert not report.is_interrupted


def test_ctrl_c_ends_the_search_and_keeps_the_report(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(PARTS, "control", Part(BrokenPart, share=1, limit=30))
    show = cli.Bar.__call__

    def interrupt(bar: cli.Bar, report: cli.Report, found: list[cli.Finding]) -> None:
        show(bar, report, found)
        if report.rounds["control"] == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(cli.Bar, "__call__", interrupt)
    file = tmp_path / "report.json"
    assert main(["600", "--only", "control", "--seed", "8", "--json", str(file)]) == 130
    written = json.loads(file.read_text())
    assert written["is_interrupted"]
    assert written["rounds"] == {"control": 2}
    assert [found["round"] for found in written["findings"]] == [0]
    assert "s, interrupted; rounds: control 2 (4 requests); 1 findings" in capsys.readouterr().out


def test_a_length_of_nothing_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for seconds in ("-5", "0", "nan", "inf"):
        with pytest.raises(SystemExit):
            main([seconds])
        assert f"SECONDS must be more than 0, got {seconds}" in capsys.readouterr().err
    for arguments, message in (
        (["--round", "-1"], "--round must be 0 or more"),
        (["60", "--json", "/no/such/folder/x.json"], "is not a file in a folder that exists"),
    ):
        with pytest.raises(SystemExit):
            main(arguments)
        assert message in capsys.readouterr().err


def test_a_command_line_without_a_length_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["60", "--round", "3"]):
        with pytest.raises(SystemExit):
            main(arguments)
        assert "SECONDS, or --round" in capsys.readouterr().err


def test_a_part_can_be_sent_to_a_process() -> None:
    """PARTS are made in the worker, so they must be importable by name."""
    for part in PARTS.values():
        assert pickle.loads(pickle.dumps(part.make)) is part.make


@pytest.mark.slow
def test_the_input_part_finds_a_broken_engine() -> None:
    part = InputPart(llm_cls=TouchyLLM)
    assert any("after" in what for what in play(part, "inputs", range(12)))
