"""The command: give the parts their turns until the time is over, and print what they find.

    python -m nanoserve.tools.soak 3600                      an hour, another seed each time
    python -m nanoserve.tools.soak 600 --only control        one part
    python -m nanoserve.tools.soak --only engine --seed 7 --round 12      one round again

A turn is one round of one part, in the part's own process. The next turn is of the part that has
had the least of its share of the time. The exit status is 1 if anything was found. A finding never
ends the search: the next round begins, in a fresh process if the last one had to be ended.

A round that is not done a few seconds after the end is dropped. Ctrl-C ends the search; the report
is that of the rounds before it, and the exit status is 130.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from nanoserve.tools.soak.control import ControlPart
from nanoserve.tools.soak.engine import EnginePart, RankPart
from nanoserve.tools.soak.inputs import InputPart
from nanoserve.tools.soak.rounds import Round
from nanoserve.tools.soak.signals import SignalPart
from nanoserve.tools.soak.worker import TimeIsOver, Worker, WorkerFailed

GRACE = 5.0  # seconds that the last round may go on when the time is over
INTERRUPTED = 130  # the exit status that shells give for Ctrl-C


class Part(NamedTuple):
    """One part of the search."""

    make: Callable[[], Callable[[Round], None]]
    share: float  # of the time, relative to the other parts
    limit: float  # seconds for one round; longer is a hang
    megabytes: float = 3000


PARTS = {
    "control": Part(ControlPart, share=3, limit=60),
    "engine": Part(EnginePart, share=4, limit=120),
    "signals": Part(SignalPart, share=2, limit=60),
    "inputs": Part(InputPart, share=3, limit=60),
    "ranks": Part(RankPart, share=1, limit=180),
}


@dataclass
class Finding:
    """Something that must not happen, and how to see it again."""

    part: str
    seed: int
    round: int
    what: str

    @property
    def command(self) -> str:
        options = f"--only {self.part} --seed {self.seed} --round {self.round}"
        return f"python -m nanoserve.tools.soak {options}"

    def __str__(self) -> str:
        return f"{self.part}, round {self.round}: {self.what}\n    again: {self.command}"


@dataclass
class Report:
    """What one search did."""

    seed: int
    seconds: float = 0.0
    is_interrupted: bool = False  # by Ctrl-C
    rounds: dict[str, int] = field(default_factory=dict)  # part -> rounds played
    requests: dict[str, int] = field(default_factory=dict)  # part -> requests or cases tried
    findings: list[Finding] = field(default_factory=list)

    def __str__(self) -> str:
        parts = [
            f"{name} {number} ({self.requests[name]} requests)"
            for name, number in self.rounds.items()
        ]
        found = f"{len(self.findings)} findings" if self.findings else "no finding"
        time = f"{self.seconds:.0f} s{', interrupted' * self.is_interrupted}"
        return f"seed {self.seed}, {time}; rounds: {', '.join(parts)}; {found}"


def play(worker: Worker, part: Part, round: Round, until: float = math.inf) -> Round:
    """One round in the worker's process. What ends the process is a finding. Raises TimeIsOver if
    the round is not done at `until` (of time.monotonic)."""
    try:
        return worker.call(round, seconds=part.limit, megabytes=part.megabytes, until=until)
    except WorkerFailed as failed:
        round.findings.append(f"{failed}\n{failed.log.strip()}")
        return round


class PlayRounds:
    """The target of a worker: a part that plays whole rounds."""

    def __init__(self, make: Callable[[], Callable[[Round], None]]) -> None:
        self.part = make()

    def __call__(self, round: Round) -> Round:
        return round.run(self.part)


def soak(
    seconds: float, seed: int, names: list[str], only_round: int | None = None, tell: Any = None
) -> Report:
    """Search for so many seconds, or play one round of each named part. `tell` gets each finding
    and, after each round, the report. Ctrl-C ends the search, too: the report says so."""
    report = Report(seed, rounds=dict.fromkeys(names, 0), requests=dict.fromkeys(names, 0))
    workers = {name: Worker(partial(PlayRounds, PARTS[name].make)) for name in names}
    spent = dict.fromkeys(names, 0.0)
    begin = time.monotonic()
    try:
        while names and report.seconds < seconds:
            name = min(names, key=lambda each: spent[each] / PARTS[each].share)
            number = report.rounds[name] if only_round is None else only_round
            start = time.monotonic()
            until = begin + seconds + GRACE
            round = play(workers[name], PARTS[name], Round(name, seed, number), until)
            spent[name] += time.monotonic() - start
            report.rounds[name] += 1
            report.requests[name] += round.num_requests
            found = [Finding(name, seed, number, what) for what in round.findings]
            report.findings += found
            report.seconds = time.monotonic() - begin
            if only_round is not None:
                names = [each for each in names if each != name]
            if tell is not None:
                tell(report, found)
    except TimeIsOver:
        report.seconds = time.monotonic() - begin
    except KeyboardInterrupt:
        report.seconds, report.is_interrupted = time.monotonic() - begin, True
    finally:
        for worker in workers.values():
            worker.close()
    return report


class Bar:
    """A tqdm bar of the seconds, with rounds, requests and findings; findings are printed above."""

    def __init__(self, seconds: float) -> None:
        form = "{l_bar}{bar}| {n:.0f}/{total:.0f} s{postfix}"
        self.bar = tqdm(total=seconds, desc="Soak", bar_format=form)

    def __call__(self, report: Report, found: list[Finding]) -> None:
        for finding in found:
            tqdm.write(str(finding))
        counts = sum(report.rounds.values()), sum(report.requests.values()), len(report.findings)
        self.bar.set_postfix_str("{} rounds, {} requests, {} findings".format(*counts), False)
        self.bar.update(min(report.seconds, self.bar.total or 0) - self.bar.n)

    def close(self) -> None:
        self.bar.close()


def read_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m nanoserve.tools.soak",
        description="Search for bugs with random inputs, until the time is over.",
    )
    parser.add_argument("seconds", type=float, nargs="?", help="how long; left out with --round")
    parser.add_argument("--seed", type=int, help="of all random numbers (default: another one)")
    parser.add_argument("--only", choices=PARTS, action="append", help="a part; may be repeated")
    parser.add_argument("--round", type=int, help="play this round of each part, and end")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report here")
    read = parser.parse_args(arguments)
    if (read.seconds is None) == (read.round is None):
        parser.error("give SECONDS, or --round with the number of one round.")
    if read.seconds is not None and not 0 < read.seconds < float("inf"):
        parser.error(f"SECONDS must be more than 0, got {read.seconds:g}.")
    if read.json is not None and (read.json.is_dir() or not read.json.parent.is_dir()):
        parser.error(f"--json {read.json} is not a file in a folder that exists.")
    if read.round is not None and read.round < 0:
        parser.error(f"--round must be 0 or more, got {read.round}.")
    return read


def main(arguments: list[str]) -> int:
    """0 without findings, 1 with findings, 130 after Ctrl-C."""
    read = read_arguments(arguments)
    os.environ["NANOSERVE_LOGGING_LEVEL"] = "CRITICAL"  # planted faults are logged as errors
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    # A process that was ended leaves semaphores, which Python removes, and would tell below the
    # report.
    quiet = "ignore::UserWarning:multiprocessing.resource_tracker"
    os.environ.setdefault("PYTHONWARNINGS", quiet)
    seed = random.SystemRandom().randrange(10**6) if read.seed is None else read.seed
    names = read.only or list(PARTS)
    bar = Bar(read.seconds or 0.0)
    try:
        report = soak(read.seconds or float("inf"), seed, names, read.round, bar)
    finally:
        bar.close()
    print(report)
    if read.json is not None:
        read.json.write_text(json.dumps(asdict(report), indent=1) + "\n")
    if report.is_interrupted:
        return INTERRUPTED
    return 1 if report.findings else 0
